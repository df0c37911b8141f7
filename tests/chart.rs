//! The Helm chart and the plain manifests, rendered by a real helm and read back with the API's own types.
//!
//! What no file here can show (that a cluster takes them, and that the rights are enough) is shown in the real cluster.

#[path = "chart/helm.rs"]
mod helm;
#[path = "chart/typed.rs"]
mod typed;

use std::path::{Path, PathBuf};
use std::process::Command;

use helm::Helm;
use serde_json::{Value, json};

/// Sets of values that must render, beside the defaults.
const GOOD: &[&[&str]] = &[
    &[],
    &["driverName=dra.net", "nameOverride=nics", "kubeletRoot=/data/kubelet", "deviceClasses=null"],
    &["image.digest=sha256:0000000000000000000000000000000000000000000000000000000000000000", "imagePullSecrets[0].name=a"],
    &[
        "agent.nriIndex=05",
        "agent.nriMargin=null",
        "agent.offerVeth=true",
        "agent.needDefaultRoute=true",
        "agent.ipoib=ignore",
        "agent.logLevel=",
    ],
    &["agent.extraArgs={--log-format=json}", "agent.extraEnv[0].name=A", "agent.extraEnv[0].value=b", "agent.logFormat=null"],
    &["agent.nri=off", "agent.guardWait=10", "agent.hold=budget", "agent.onMissedSandbox=evict"],
    &["agent.guardDir=", "agent.onOverrun=fail", "agent.hold=0", "agent.nriMarginPercent=null"],
    &["http.address=::", "http.port=9999", "serviceMonitor.create=true", "serviceMonitor.labels.release=prometheus"],
    &["apiServer.host=fd00::1", "apiServer.port=6443", "rbac.create=false", "admissionPolicy.create=false"],
    &[
        "requiredPlugin.policy.create=true",
        "requiredPlugin.policy.namespaceLabels.team=a",
        "fullnameOverride=x",
        "driverName=dra.net",
    ],
    &["configPolicy.create=true", "configPolicy.actions={Warn,Audit}", "driverName=dra.net"],
    &["serviceAccount.create=false", "serviceAccount.name=other", "serviceAccount.annotations.a=b", "podLabels.a=b"],
    &["admissionPolicy.actions={Warn,Audit}", "updateStrategy.type=OnDelete", "updateStrategy.rollingUpdate=null"],
    &["updateStrategy.rollingUpdate.maxSurge=0", "updateStrategy.rollingUpdate.maxUnavailable=10%", "podAnnotations.a=b"],
    &["deviceClasses[0].name=rdma", "deviceClasses[0].selectors={device.attributes[\"dranic.dev\"].rdma}"],
    &[
        "deviceClasses[0].name=mtu",
        "deviceClasses[0].parameters.interface.mtu=9000",
        "deviceClasses[0].extendedResourceName=a.b/nic",
    ],
    &[
        "extraVolumes[0].name=x",
        "extraVolumes[0].emptyDir.medium=Memory",
        "extraVolumeMounts[0].name=x",
        "extraVolumeMounts[0].mountPath=/x",
    ],
    &["securityContext.privileged=true", "securityContext.allowPrivilegeEscalation=true", "resources.limits.memory=1Gi"],
];

/// What must be refused, and a part of the reason.
const BAD: &[(&str, &str)] = &[
    ("nope=1", "'nope' not allowed"),
    ("agent.nope=1", "'nope' not allowed"),
    ("agent.nriindex=10", "'nriindex' not allowed"),
    ("http.nope=1", "'nope' not allowed"),
    ("livenessProbe.nope=1", "'nope' not allowed"),
    ("deviceClasses[0].nope=1", "'nope' not allowed"),
    ("driverName=", "/driverName"),
    ("driverName=A/b", "/driverName"),
    ("driverName=null", "driverName"),
    ("kubeletRoot=var/lib/kubelet", "/kubeletRoot"),
    ("kubeletRoot=/var/lib/kubelet/", "/kubeletRoot"),
    ("agent.guardDir=bin", "/agent/guardDir"),
    ("agent.guardWait=111", "/agent/guardWait"),
    ("agent.nri=perhaps", "/agent/nri"),
    ("agent.hold=long", "/agent/hold"),
    ("agent.onMissedSandbox=ignore", "/agent/onMissedSandbox"),
    ("agent.stateDir=/a/../b", "/agent/stateDir"),
    ("agent.stateDir=null", "stateDir"),
    ("agent.nriSocket=/nri.sock", "/agent/nriSocket"),
    ("agent.nriIndex=1", "/agent/nriIndex"),
    ("agent.nriMargin=0", "/agent/nriMargin"),
    ("agent.onOverrun=maybe", "/agent/onOverrun"),
    ("agent.rescan=0", "/agent/rescan"),
    ("agent.waitForDevice=41", "/agent/waitForDevice"),
    ("agent.dhcpTimeout=0", "/agent/dhcpTimeout"),
    ("agent.logFormat=xml", "/agent/logFormat"),
    ("http.address=localhost", "/http/address"),
    ("http.port=70000", "/http/port"),
    ("apiServer.host=api.example.com", "/apiServer/host"),
    ("admissionPolicy.actions={Deny,Warn}", "/admissionPolicy/actions"),
    ("admissionPolicy.actions={}", "/admissionPolicy/actions"),
    ("configPolicy.actions={Deny,Warn}", "/configPolicy/actions"),
    ("configPolicy.nope=1", "'nope' not allowed"),
    ("requiredPlugin.policy.apiVersion=v1alpha1", "/requiredPlugin/policy/apiVersion"),
    ("requiredPlugin.policy.nope=1", "'nope' not allowed"),
    ("serviceAccount.create=false", "serviceAccount.name is needed"),
    ("serviceMonitor.create=true", "needs http.address other than loopback"),
    ("terminationGracePeriodSeconds=5", "/terminationGracePeriodSeconds"),
    ("updateStrategy.rollingUpdate.maxSurge=200%", "/updateStrategy/rollingUpdate/maxSurge"),
    ("image.digest=latest", "/image/digest"),
    ("image.pullPolicy=always", "/image/pullPolicy"),
];

fn repo() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn read(file: &str) -> String {
    let path = repo().join(file);
    std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// The one object of `kind` among `objects`.
fn one<'a>(objects: &'a [Value], kind: &str) -> &'a Value {
    let all: Vec<&Value> = objects.iter().filter(|o| o["kind"] == kind).collect();
    assert_eq!(all.len(), 1, "{kind}: {all:?}");
    all[0]
}

fn container(objects: &[Value]) -> &Value {
    &one(objects, "DaemonSet")["spec"]["template"]["spec"]["containers"][0]
}

fn args(objects: &[Value]) -> Vec<String> {
    let args = container(objects)["args"].as_array().unwrap();
    args.iter().map(|a| a.as_str().unwrap().to_owned()).collect()
}

#[test]
fn good_values_render_to_what_the_api_knows() {
    let Some(helm) = Helm::get() else { return };
    for values in GOOD {
        helm.lint(values).unwrap_or_else(|why| panic!("{values:?}: {why}"));
        let objects = helm.template(values).unwrap_or_else(|why| panic!("{values:?}: {why}"));
        for object in &objects {
            typed::check(object).unwrap_or_else(|why| panic!("{values:?}: {why}"));
        }
    }
}

#[test]
fn bad_values_are_refused_by_name() {
    let Some(helm) = Helm::get() else { return };
    for (value, reason) in BAD {
        let error = helm.template(&[value]).expect_err(value);
        assert!(error.contains(reason), "{value}: {error}");
    }
}

#[test]
fn a_typing_error_in_a_template_would_be_found() {
    let object = json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "a"}, "spec": {"containers": [{"name": "a", "imag": "b"}]}});
    assert_eq!(typed::check(&object).unwrap_err(), "Pod a: .spec.containers[0].imag is not known to the API");
}

#[test]
fn dra_net_is_a_driver_name_everywhere() {
    let Some(helm) = Helm::get() else { return };
    let objects = helm.template(&["driverName=dra.net"]).unwrap();
    let text = serde_json::to_string(&objects).unwrap();
    assert!(!text.contains("dranic.dev"), "{text}");
    assert!(args(&objects).contains(&"--driver-name=dra.net".to_owned()));
    assert_eq!(one(&objects, "DeviceClass")["spec"]["selectors"][0]["cel"]["expression"], r#"device.driver == "dra.net""#);
    let rules = one(&objects, "ClusterRole")["rules"].as_array().unwrap();
    let status = rules.iter().find(|r| r["resources"] == json!(["resourceclaims/driver"])).unwrap();
    assert_eq!(status["resourceNames"], json!(["dra.net"]));
    let policy = one(&objects, "ValidatingAdmissionPolicy")["spec"]["validations"].to_string();
    assert!(policy.contains("driver == 'dra.net'"), "{policy}");
}

#[test]
fn the_guard_has_the_same_path_in_the_pod_and_on_the_node() {
    let Some(helm) = Helm::get() else { return };
    let guard = |values: &[&str]| {
        let objects = helm.template(values).unwrap();
        let pod = &one(&objects, "DaemonSet")["spec"]["template"]["spec"];
        let named = |list: &Value| list.as_array().unwrap().iter().find(|entry| entry["name"] == "guard").cloned();
        let flag = args(&objects).into_iter().find(|a| a.starts_with("--guard-dir"));
        (flag, named(&pod["volumes"]), named(&container(&objects)["volumeMounts"]))
    };
    let (flag, volume, mount) = guard(&["agent.guardDir=/opt/dranic"]);
    assert_eq!(flag.as_deref(), Some("--guard-dir=/opt/dranic"));
    assert_eq!(volume.unwrap()["hostPath"]["path"], "/opt/dranic");
    assert_eq!(mount.unwrap()["mountPath"], "/opt/dranic");
    assert_eq!(guard(&["agent.guardDir="]), (Some("--guard-dir=".to_owned()), None, None));
}

#[test]
fn the_right_to_evict_is_given_only_where_it_is_used() {
    let Some(helm) = Helm::get() else { return };
    let evicts = |values: &[&str]| {
        let objects = helm.template(values).unwrap();
        one(&objects, "ClusterRole")["rules"].as_array().unwrap().iter().any(|r| r["resources"] == json!(["pods/eviction"]))
    };
    assert!(!evicts(&[]) && !evicts(&["agent.onMissedSandbox=null"]) && evicts(&["agent.onMissedSandbox=evict"]));
}

#[test]
fn the_plugin_is_required_by_its_name_and_not_of_our_own_pods() {
    let Some(helm) = Helm::get() else { return };
    let objects = helm.template_in("nics", &["requiredPlugin.policy.create=true", "driverName=dra.net"]).unwrap();
    let policy = one(&objects, "MutatingAdmissionPolicy");
    let expression = policy["spec"]["mutations"][0]["applyConfiguration"]["expression"].as_str().unwrap();
    assert!(expression.contains(r#"{'required-plugins.noderesource.dev': '["dra.net"]'}"#), "{expression}");
    let binding = one(&objects, "MutatingAdmissionPolicyBinding");
    assert_eq!(binding["spec"]["policyName"], policy["metadata"]["name"]);
    let excluded = &binding["spec"]["matchResources"]["namespaceSelector"]["matchExpressions"][0];
    assert_eq!(excluded["operator"], "NotIn");
    let namespaces = excluded["values"].as_array().unwrap();
    assert_eq!(namespaces, &[json!("kube-system"), json!("nics")]);
    assert_eq!(one(&objects, "DaemonSet")["metadata"]["namespace"], "nics");
    assert!(helm.template(&[]).unwrap().iter().all(|object| object["kind"] != "MutatingAdmissionPolicy"), "it is off by default");
}

#[test]
fn null_leaves_a_flag_out_and_an_empty_text_does_not() {
    let Some(helm) = Helm::get() else { return };
    let level = |values: &[&str]| {
        let args = args(&helm.template(values).unwrap());
        args.into_iter().find(|a| a.starts_with("--log-level"))
    };
    assert_eq!(level(&[]).as_deref(), Some("--log-level=info"));
    assert_eq!(level(&["agent.logLevel="]).as_deref(), Some("--log-level="));
    assert_eq!(level(&["agent.logLevel=null"]), None);
}

#[test]
fn probes_ask_where_the_agent_listens() {
    let Some(helm) = Helm::get() else { return };
    for (address, listens, asked) in [
        ("127.0.0.1", "127.0.0.1:9177", "127.0.0.1"),
        ("0.0.0.0", "0.0.0.0:9177", "127.0.0.1"),
        ("::", "[::]:9177", "::1"),
        ("192.0.2.1", "192.0.2.1:9177", "192.0.2.1"),
    ] {
        let objects = helm.template(&[&format!("http.address={address}")]).unwrap();
        assert!(args(&objects).contains(&format!("--http-address={listens}")), "{address}");
        let container = container(&objects);
        for (probe, path) in [("startupProbe", "/healthz"), ("livenessProbe", "/healthz"), ("readinessProbe", "/readyz")] {
            let get = &container[probe]["httpGet"];
            assert_eq!(get, &json!({"host": asked, "path": path, "port": 9177}), "{address} {probe}");
        }
        assert!(container["ports"].is_null(), "the node would have no place for a second agent in an update");
    }
}

/// Flags of `dranic agent` that the chart sets in another way, or not at all.
const NOT_FLAGS_OF_THE_CHART: &[&str] = &[
    "node-name",   // NODE_NAME, from the pod's spec
    "instance",    // POD_UID, likewise
    "kubeconfig",  // the service account
    "gate-socket", // beside the status socket, whose folder is mounted
    "help",
];

/// Flags whose default in a pod is another one.
const OTHER_DEFAULTS: &[&str] = &["sysctl-dir", "on-overrun"];

#[test]
fn the_chart_knows_every_flag_and_its_default() {
    let Some(helm) = Helm::get() else { return };
    let objects = helm
        .template(&[
            "agent.offerVeth=true",
            "agent.needDefaultRoute=true",
            "agent.ipoib=attach",
            "agent.onOverrun=defer",
            "agent.shareSlots=0",
            "agent.share=*",
        ])
        .unwrap();
    let args = args(&objects);
    let environment = container(&objects)["env"].to_string();
    let output = Command::new(env!("CARGO_BIN_EXE_dranic")).args(["agent", "--help"]).env_clear().output().unwrap();
    let help = String::from_utf8(output.stdout).unwrap();
    let mut seen = Vec::new();
    for section in help.split("\n  ").map(str::trim_start) {
        let Some(start) = section.find("--").filter(|at| section[..*at].chars().all(|c| "-, h".contains(c))) else { continue };
        let flag: String = section[start + 2..].chars().take_while(|c| c.is_ascii_lowercase() || *c == '-').collect();
        seen.push(flag);
    }
    assert!(seen.len() > 15, "{seen:?} from {help}");
    for flag in seen.iter().filter(|flag| !NOT_FLAGS_OF_THE_CHART.contains(&flag.as_str())) {
        if environment.contains(&format!("\"DRANIC_{}\"", flag.to_uppercase().replace('-', "_"))) {
            continue;
        }
        let ours = args.iter().find(|a| a.trim_start_matches("--").split('=').next() == Some(flag));
        let ours = ours.unwrap_or_else(|| panic!("--{flag} of the agent can't be set by the chart: add a value"));
        let Some((_, value)) = ours.split_once('=') else { continue };
        if !OTHER_DEFAULTS.contains(&flag.as_str()) {
            // Lines are wrapped.
            let help = help.split_whitespace().collect::<Vec<_>>().join(" ");
            let about = help.split(&format!("--{flag} <")).nth(1).unwrap();
            let default = about.split("[default: ").nth(1).and_then(|rest| rest.split(']').next());
            assert_eq!(default, Some(value), "--{flag}");
        }
    }
    for arg in args.iter().skip(1) {
        let flag = arg.trim_start_matches("--").split('=').next().unwrap();
        assert!(seen.iter().any(|s| s == flag), "the agent has no {arg}");
    }
}

#[test]
fn the_readme_has_every_value_with_its_default() {
    let Some(helm) = Helm::get() else { return };
    let values = helm.json(&[read("charts/dranic/values.yaml")]).unwrap().remove(0);
    let readme = read("charts/dranic/README.md");
    let rows: Vec<(&str, &str)> = readme
        .lines()
        .filter_map(|line| line.strip_prefix("| `")?.split_once("` | `"))
        .map(|(path, rest)| (path, rest.split_once("` |").unwrap().0))
        .collect();
    assert!(rows.len() > 40, "{rows:?}");
    for (path, default) in &rows {
        let value = values.pointer(&format!("/{}", path.replace('.', "/")));
        let value = value.unwrap_or_else(|| panic!("README has {path}, values.yaml has not"));
        let default: Value = serde_json::from_str(default).unwrap_or_else(|error| panic!("{path}: {default}: {error}"));
        assert_eq!(value, &default, "{path}");
    }
    let mut missing = Vec::new();
    not_in(&rows, "", &values, &mut missing);
    assert_eq!(missing, Vec::<String>::new(), "values that README.md lacks");
}

/// Paths of `value`'s leaves that neither they nor anything above them are in `rows`.
fn not_in(rows: &[(&str, &str)], path: &str, value: &Value, missing: &mut Vec<String>) {
    if rows.iter().any(|(row, _)| *row == path) {
        return;
    }
    match value.as_object() {
        Some(fields) => {
            for (key, value) in fields {
                let path = if path.is_empty() { key.clone() } else { format!("{path}.{key}") };
                not_in(rows, &path, value, missing);
            }
        }
        None => missing.push(path.to_owned()),
    }
}

#[test]
fn the_chart_has_the_programs_version() {
    let chart = read("charts/dranic/Chart.yaml");
    let version = env!("CARGO_PKG_VERSION");
    assert!(chart.contains(&format!("\nversion: {version}\n")), "{chart}");
    assert!(chart.contains(&format!("\nappVersion: \"{version}\"\n")), "{chart}");
}

#[test]
fn manifests_are_what_the_chart_gives() {
    let Some(_) = Helm::get() else { return };
    let scratch = tempfile::tempdir().unwrap();
    let output = Command::new(repo().join("hack/manifests.sh")).arg(scratch.path()).output().unwrap();
    assert!(output.status.success(), "{output:?}");
    for name in [
        "admissionpolicy.yaml",
        "daemonset.yaml",
        "deviceclass.yaml",
        "optional/config-policy.yaml",
        "optional/required-plugin-policy.yaml",
        "rbac.yaml",
    ] {
        let made = std::fs::read_to_string(scratch.path().join(name)).unwrap();
        assert_eq!(read(&format!("manifests/{name}")), made, "manifests/{name}: run hack/manifests.sh");
    }
}

#[test]
fn examples_are_claims_that_the_agent_takes() {
    let Some(helm) = Helm::get() else { return };
    let examples: Vec<PathBuf> =
        std::fs::read_dir(repo().join("manifests/examples")).unwrap().map(|entry| entry.unwrap().path()).collect();
    assert!(examples.len() >= 4);
    for file in examples {
        let text = std::fs::read_to_string(&file).unwrap();
        let objects = helm.documents(&text).unwrap();
        for object in &objects {
            typed::check(object).unwrap_or_else(|why| panic!("{}: {why}", file.display()));
        }
        let devices = &one(&objects, "ResourceClaimTemplate")["spec"]["spec"]["devices"];
        let text = devices.to_string();
        assert!(text.contains(r#""deviceClassName":"dranic""#), "{}: the chart's class", file.display());
        for config in devices["config"].as_array().into_iter().flatten() {
            assert_eq!(config["opaque"]["driver"], "dranic.dev", "{}", file.display());
            let parameters = dranic::config::parse(&config["opaque"]["parameters"].to_string());
            let faults = parameters.unwrap_or_else(|why| panic!("{}: {why}", file.display())).validate();
            assert!(faults.is_empty(), "{}: {faults:?}", file.display());
        }
    }
}
