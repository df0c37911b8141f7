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
    for longest in [LONGEST_DELAY, LONGEST_DELAY_ABSENT] {
        let mut backoff = Backoff::default();
        let mut expected = FIRST_DELAY;
        for _ in 0..10 {
            let delay = backoff.next(longest);
            assert!(delay <= expected && delay >= expected * 3 / 4, "{delay:?} of {expected:?}");
            expected = (expected * 2).min(longest);
        }
    }
}

#[test]
fn a_socket_that_was_away_long_does_not_slow_down_what_follows() {
    let mut backoff = Backoff::default();
    for _ in 0..20 {
        backoff.next(LONGEST_DELAY_ABSENT);
    }
    assert!(backoff.next(LONGEST_DELAY) <= LONGEST_DELAY_ABSENT);
}
