//! What containerd and the CNI plugins are told.

use std::time::Duration;

use serde_json::json;

use super::{Kit, Options, PAUSE_IMAGE};

/// `config.toml`. Root, state and sockets are containerd's defaults: in the node those paths lie in the scratch folder.
pub(super) fn containerd(kit: &Kit, scratch: &str, options: &Options) -> String {
    let kit = kit.dir().display();
    let level = &options.log_level;
    let request = timeout("plugin_request_timeout", options.nri_request_timeout);
    let registration = timeout("plugin_registration_timeout", options.nri_registration_timeout);
    format!(
        "version = 3
imports = []
disabled_plugins = [
  'io.containerd.snapshotter.v1.blockfile', 'io.containerd.snapshotter.v1.btrfs', 'io.containerd.snapshotter.v1.devmapper',
  'io.containerd.snapshotter.v1.erofs', 'io.containerd.snapshotter.v1.zfs', 'io.containerd.tracing.processor.v1.otlp',
]
[debug]
  level = '{level}'
[plugins.'io.containerd.internal.v1.opt']
  path = '{scratch}/opt'
[plugins.'io.containerd.cri.v1.images']
  snapshotter = 'native'   # overlayfs does not work everywhere, the copies are 2 MB
  [plugins.'io.containerd.cri.v1.images'.pinned_images]
    sandbox = '{PAUSE_IMAGE}'
[plugins.'io.containerd.cri.v1.runtime']
  enable_cdi = true
  cdi_spec_dirs = ['/run/cdi', '{scratch}/agent/cdi']
  disable_apparmor = true
  restrict_oom_score_adj = true   # without CAP_SYS_RESOURCE no sandbox starts otherwise
  [plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc]
    runtime_type = 'io.containerd.runc.v2'
    [plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc.options]
      BinaryName = '{kit}/bin/runc'
      SystemdCgroup = false
  [plugins.'io.containerd.cri.v1.runtime'.cni]
    bin_dirs = ['{kit}/cni']
    conf_dir = '{scratch}/cni'
[plugins.'io.containerd.nri.v1.nri']
  disable = false
  socket_path = '/run/nri/nri.sock'
  plugin_path = '{scratch}/nri/plugins'
  plugin_config_path = '{scratch}/nri/conf.d'
{request}{registration}"
    )
}

fn timeout(key: &str, value: Option<Duration>) -> String {
    value.map(|value| format!("  {key} = '{}ms'\n", value.as_millis())).unwrap_or_default()
}

/// The pod network: a bridge of the node, addresses from a range of it, the bridge as gateway.
pub(super) fn cni() -> String {
    json!({
        "cniVersion": "1.0.0",
        "name": "pods",
        "plugins": [{
            "type": "bridge",
            "bridge": "pods0",
            "isGateway": true,
            "ipMasq": false,
            "ipam": {
                "type": "host-local",
                "ranges": [[{"subnet": "10.244.0.0/24"}]],
                "routes": [{"dst": "0.0.0.0/0"}],
            },
        }],
    })
    .to_string()
}
