//! Links over real rtnetlink, in scratch network namespaces.

use std::time::{Duration, Instant};

use dranic::netdev::link;
use dranic::netlink::RouteSocket;

fn soon() -> Instant {
    Instant::now() + Duration::from_secs(5)
}

#[test]
fn smoke() {
    let mut socket = RouteSocket::open().unwrap();
    let links = link::list(&mut socket, soon()).unwrap();
    println!("{links:#?}");
    let lo = link::by_name(&mut socket, "lo", soon()).unwrap().unwrap();
    assert_eq!(link::by_index(&mut socket, lo.index, soon()).unwrap(), Some(lo));
    assert_eq!(link::by_index(&mut socket, 999_999, soon()).unwrap(), None);
    assert_eq!(link::by_name(&mut socket, "nosuchlink-with-a-long-name", soon()).unwrap(), None);
}
