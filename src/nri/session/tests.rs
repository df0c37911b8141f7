use super::*;

#[tokio::test]
async fn names_and_indices_that_runtimes_accept() {
    let config = |name: &str, index: &str| SessionConfig::new("/s", name, index, Margin::default(), Handle::current());
    assert!(config("dranic", "10").is_ok());
    assert!(config("dra.net_a+b-c", "00").is_ok());
    for name in ["", "foo/bar", "a b", "é"] {
        assert_eq!(config(name, "10").unwrap_err(), ConfigError::Name(name.to_owned()));
    }
    for index in ["", "1", "100", "1a", "٣"] {
        assert_eq!(config("dranic", index).unwrap_err(), ConfigError::Index(index.to_owned()));
    }
}

#[test]
fn delays_double_up_to_the_limit() {
    let mut backoff = Backoff::default();
    let mut expected = FIRST_DELAY;
    for _ in 0..10 {
        let delay = backoff.next();
        assert!(delay <= expected && delay >= expected * 3 / 4, "{delay:?} of {expected:?}");
        expected = (expected * 2).min(LONGEST_DELAY);
    }
}

#[test]
fn a_runtime_that_starts_again_is_met_at_once() {
    let ms = |seconds: u64| absent(Duration::from_secs(seconds)).as_millis();
    assert_eq!([0, 29, 30, 299, 300, 100_000].map(ms), [20, 20, 200, 200, 800, 800]);
}
