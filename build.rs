//! Compiles the protocol definitions under `proto/` with protox, so that no protoc is needed.

use std::path::Path;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo:rerun-if-changed=proto");
    let out = std::env::var_os("OUT_DIR").ok_or("OUT_DIR is not set")?;
    for name in ["pluginregistration", "dra_v1", "dra_v1beta1", "dra_health_v1", "dra_health_v1alpha1", "nri"] {
        let descriptors = protox::compile([format!("proto/{name}.proto")], ["proto"])?;
        // One folder a file: packages of different protocols may share a name.
        let dir = Path::new(&out).join(name);
        std::fs::create_dir_all(&dir)?;
        tonic_prost_build::configure()
            .build_client(name != "nri")
            .build_server(name != "nri")
            .btree_map(".")
            .out_dir(&dir)
            .compile_fds(descriptors)?;
    }
    Ok(())
}
