//! How a container shows what it uses: names of its CDI devices, and of environment variables that they bring.

use crate::ledger::{RdmaRecord, Share};
use crate::names::ClaimUid;

/// Begin of the name of the variable that stands for a claim; its UID follows, since a container can have several.
pub const CLAIM: &str = "DRANIC_CLAIM_";
/// Begin of the name of the variable that stands for a device with RDMA; the name of its CDI device follows, since a container may use
/// one request of a claim only.
pub const RDMA: &str = "DRANIC_RDMA_";

/// Name of a device's entry in the claim's CDI spec. Shares of one device differ by their ids.
#[must_use]
pub fn device(claim: &ClaimUid, share: &Share) -> String {
    match &share.id {
        None => format!("{claim}-{}", share.device),
        Some(id) => format!("{claim}-{}-{id}", share.device),
    }
}

/// The variable of a device with RDMA. Its value is what NCCL's `NCCL_IB_HCA` takes: `mlx5_0:1`.
#[must_use]
pub fn rdma(claim: &ClaimUid, share: &Share, rdma: &RdmaRecord) -> String {
    format!("{RDMA}{}={}:{}", device(claim, share), rdma.name, rdma.port)
}

/// Whether one of a container's variables (`NAME=value`) is that of this device.
#[must_use]
pub fn has_rdma(variables: &[String], claim: &ClaimUid, share: &Share) -> bool {
    let name = device(claim, share);
    let names = variables.iter().filter_map(|variable| variable.strip_prefix(RDMA)?.split_once('='));
    names.into_iter().any(|(of, _)| of == name)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::names::DeviceName;

    #[test]
    fn a_container_has_the_mark_of_the_very_share() {
        let uid = ClaimUid::new("u-1").unwrap();
        let share = |id: Option<&str>| Share { device: DeviceName::new("nic-a").unwrap(), id: id.map(str::to_owned) };
        let of: RdmaRecord = serde_json::from_value(serde_json::json!({
            "name": "mlx5_0", "index": 3, "port": 2, "protocol": "RoCE", "mode": "shared", "charDevices": [], "waitForPort": true
        }))
        .unwrap();
        let mark = rdma(&uid, &share(Some("5a1f")), &of);
        assert_eq!(mark, "DRANIC_RDMA_u-1-nic-a-5a1f=mlx5_0:2");
        let env = ["PATH=/bin".to_owned(), mark];
        assert!(has_rdma(&env, &uid, &share(Some("5a1f"))));
        assert!(!has_rdma(&env, &uid, &share(None)) && !has_rdma(&env, &uid, &share(Some("5a1"))));
        assert!(!has_rdma(&env, &ClaimUid::new("u-2").unwrap(), &share(Some("5a1f"))));
    }
}
