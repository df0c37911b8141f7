use super::*;

fn report(files: &[&str], drivers: &[&str]) -> Report {
    let files: Vec<_> = files
        .iter()
        .enumerate()
        .map(|(i, text)| (format!("{i}.yaml"), documents(text).unwrap_or_else(|e| panic!("{e}"))))
        .collect();
    check(&files, &drivers.iter().map(|d| (*d).to_owned()).collect::<Vec<_>>())
}

fn faults(text: &str) -> Vec<String> {
    let line = |f: Fault| format!("{}:{}: {}: {}: {}", f.file, f.at.line, f.object, f.path, f.message);
    report(&[text], &["dranic.dev"]).faults.into_iter().map(line).collect()
}

const CLASS: &str = "
apiVersion: resource.k8s.io/v1
kind: DeviceClass
metadata: {name: nic}
spec:
  config:
  - opaque: {driver: dranic.dev, parameters: {interface: {dhcp: false, mtu: 9000}}}
";

fn claim(parameters: &str) -> String {
    format!(
        "
apiVersion: resource.k8s.io/v1
kind: ResourceClaimTemplate
metadata: {{name: t, namespace: a}}
spec:
  spec:
    devices:
      requests:
      - name: r
        exactly: {{deviceClassName: nic}}
      config:
      - opaque:
          driver: dranic.dev
          parameters:
{parameters}"
    )
}

#[test]
fn a_fault_has_its_line_its_path_and_what_is_allowed() {
    let text = claim("            interface:\n              name: rail0\n              mtu: 5\n");
    assert_eq!(
        faults(&format!("{CLASS}---{text}")),
        [
            "0.yaml:24: ResourceClaimTemplate a/t: spec.spec.devices.config[0].opaque.parameters.interface.mtu: is 5; must be 68 to \
          2147483647 bytes"
        ]
    );
}

#[test]
fn every_fault_of_form_is_said_at_once() {
    let text = claim(
        "            interface: {mtu: x, nam: a, addresses: [10.0.0.5]}\n            routes: {}\n            ethtool: 1\n            interface: {vrf: {name: 7}}\n",
    );
    let found = faults(&text);
    assert_eq!(found.len(), 4, "{found:#?}");
    assert!(found.iter().any(|f| f.starts_with("0.yaml:18:") && f.contains("parameters.interface: stands twice")), "{found:#?}");
    assert!(found.iter().any(|f| f.starts_with("0.yaml:18:") && f.contains("parameters.interface.vrf.name: ")), "{found:#?}");
    assert!(found.iter().any(|f| f.starts_with("0.yaml:16:") && f.contains("parameters.routes: ")), "{found:#?}");
    assert!(found.iter().any(|f| f.starts_with("0.yaml:17:") && f.contains("parameters.ethtool: ")), "{found:#?}");
}

#[test]
fn a_class_and_a_claim_are_checked_together() {
    let text = claim("            interface: {dhcp: true}\n");
    let class = CLASS.replace("dhcp: false", "addresses: [10.0.0.5/24]");
    let found = faults(&format!("{class}---{text}"));
    assert_eq!(found.len(), 1, "{found:#?}");
    assert!(found[0].starts_with("0.yaml:22: ResourceClaimTemplate a/t: spec.spec.devices.config[0]"), "{found:#?}");
    assert!(
        found[0].contains("interface.dhcp: can't be true when") && found[0].ends_with("(class and claim combined)"),
        "{found:#?}"
    );
    // The claim mends what the class has wrong, and only for a claim that names this class.
    let class = CLASS.replace("9000", "5");
    assert_eq!(faults(&format!("{class}---{}", claim("            interface: {mtu: 1500}\n"))), [""; 0]);
    assert_eq!(faults(&class).len(), 1);
    let elsewhere = claim("            interface: {mtu: 1500}\n").replace("{deviceClassName: nic}", "{deviceClassName: gpu}");
    assert_eq!(faults(&format!("{class}---{elsewhere}")).len(), 1);
}

#[test]
fn a_claim_whose_class_is_not_there_says_so() {
    let found = faults(&claim("            interface: {mtu: 5}\n"));
    assert!(found[0].ends_with("(without DeviceClass nic, which is not in the files)"), "{found:?}");
}

#[test]
fn entries_are_for_the_requests_that_they_name() {
    let text = |named: &str| {
        format!(
            "{{apiVersion: resource.k8s.io/v1beta1, kind: ResourceClaim, metadata: {{name: c}}, spec: {{devices: {{
requests: [{{name: a, deviceClassName: nic}}, {{name: b, firstAvailable: [{{name: x, deviceClassName: nic}}]}}],
config: [
{{requests: [a], opaque: {{driver: dranic.dev, parameters: {{interface: {{addresses: [10.0.0.5/24]}}}}}}}},
{{requests: [{named}], opaque: {{driver: dranic.dev, parameters: {{interface: {{dhcp: true, mtu: 5}}}}}}}}]}}}}}}"
        )
    };
    let messages = |named: &str| faults(&text(named)).into_iter().filter(|f| f.contains(".dhcp: can't")).count();
    assert_eq!((messages("a"), messages("b"), messages("b/x")), (1, 0, 0));
    assert!(faults(&text("b/x")).iter().any(|f| f.contains("config[1].opaque.parameters.interface.mtu")));
}

#[test]
fn an_entry_for_no_request_is_checked_by_itself() {
    let text = "{apiVersion: resource.k8s.io/v1, kind: ResourceClaim, metadata: {name: c}, spec: {devices: {config: [
        {requests: [b], opaque: {driver: dranic.dev, parameters: {interface: {mtu: 5}}}}]}}}";
    assert_eq!(faults(text).len(), 1);
    let tabs = "{\n\t\"kind\": \"DeviceClass\",\n\t\"apiVersion\": \"resource.k8s.io/v1\",\n\t\"metadata\": {\n\t\t\"name\": \"\\u00e4\"\n\t}\n}\n";
    assert_eq!(report(&[tabs], &["dranic.dev"]).objects, 1, "JSON with tabs");
}

#[test]
fn lists_json_all_versions_and_several_drivers_are_read() {
    let json = r#"{"apiVersion": "v1", "kind": "List", "items": [
        {"kind": "Pod", "apiVersion": "v1", "metadata": {"name": "p"}},
        {"kind": "DeviceClass", "apiVersion": "resource.k8s.io/v1beta2", "metadata": {"name": "n"}, "spec": {"config": [
            {"opaque": {"driver": "dra.net", "parameters": {"interface": {"mtu": 5}}}},
            {"opaque": {"driver": "gpu.example.com", "parameters": 5}},
            {"opaque": {"driver": "dranic.dev"}}]}}]}"#;
    let found = report(&[json], &["dra.net", "dranic.dev"]);
    assert_eq!((found.objects, found.configurations, found.foreign), (1, 2, 1));
    assert_eq!(found.ignored, ["Pod (v1) p"]);
    assert_eq!(found.faults.len(), 1);
    assert_eq!(found.faults[0].path, "items[1].spec.config[0].opaque.parameters.interface.mtu");
    assert_eq!(found.faults[0].at.line, 4);
    assert_eq!(report(&[json], &["dranic.dev"]).faults, []);
}

#[test]
fn fields_that_are_not_carried_out_yet_are_faults() {
    let config = crate::config::parse(r#"{"profile": "rail"}"#).unwrap();
    let expected = usize::from(!config.not_supported_yet().is_empty());
    assert_eq!(faults(&claim("            profile: rail\n")).len(), expected);
}

#[test]
fn scalars_are_what_kubectl_makes_of_them() {
    let json = |text: &str| documents(text).unwrap()[0].to_json().to_string();
    assert_eq!(
        json("[1, -1, 0x10, 010, 1_000, 1.5, yes, off, ~, null, '5', !!str 5, 02:00:00:00:00:05, 10.0.0.1/8]").replace('"', "'"),
        "[1,-1,16,8,1000,1.5,true,false,null,null,'5','5','02:00:00:00:00:05','10.0.0.1/8']"
    );
    assert_eq!(json("a: |\n  x\n  y\n"), r#"{"a":"x\ny\n"}"#);
}

#[test]
fn aliases_and_merged_maps_are_written_out() {
    let json = |text: &str| documents(text).unwrap()[0].to_json().to_string();
    assert_eq!(
        json("a: &x {b: 1, c: 2}\nd: *x\ne: {<<: *x, b: 3}\n"),
        r#"{"a":{"b":1,"c":2},"d":{"b":1,"c":2},"e":{"b":3,"c":2}}"#
    );
    assert_eq!(documents("a: &x {b: 1}\ne: {<<: *x, b: 3}\n").unwrap()[0].repeated(), []);
    assert!(documents("a: &x [*x]").unwrap_err().why.contains("alias"));
    assert!(documents("a: *x").is_err());
}

#[test]
fn what_is_read_is_bounded() {
    let refused = |text: &str| documents(text).unwrap_err().to_string();
    assert!(refused(&" ".repeat(yaml::TEXT_MAX + 1)).contains("at most"));
    assert!(refused(&("[".repeat(100) + &"]".repeat(100))).contains("nested"));
    assert!(refused(&"- ".repeat(100)).contains("nested"));
    let mut bomb = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n".to_owned();
    for n in 1..12 {
        let inner = vec![format!("*a{}", n - 1); 10].join(", ");
        bomb.push_str(&format!("a{n}: &a{n} [{inner}]\n"));
    }
    assert!(refused(&bomb).contains("aliases"));
    let mut deep = "a0: &a0 [[[[[[[[[[x]]]]]]]]]]\n".to_owned();
    for n in 1..12 {
        deep.push_str(&format!("a{n}: &a{n} [[[[[[[[[*a{}]]]]]]]]]\n", n - 1));
    }
    assert!(refused(&deep).contains("nested"));
    let keys: String = (0..20_000).map(|n| format!("k{n}: 1\n")).collect();
    assert!(refused(&keys).contains("keys"));
    assert!(refused("a: [").starts_with("line "));
    assert!(refused("? [a]\n: b\n").contains("can't be a key"));
}

#[test]
fn the_manifests_we_ship_are_without_fault() {
    for (file, text) in [
        ("manifests/deviceclass.yaml", include_str!("../../manifests/deviceclass.yaml")),
        ("one-nic", include_str!("../../manifests/examples/one-nic.yaml")),
        ("whole-machine", include_str!("../../manifests/examples/whole-machine.yaml")),
        ("fast-or-any", include_str!("../../manifests/examples/fast-or-any.yaml")),
        ("beside-the-gpu", include_str!("../../manifests/examples/beside-the-gpu.yaml")),
    ] {
        assert_eq!(faults(text), [""; 0], "{file}");
    }
}
