//! A real helm, and YAML by way of it (no crate of ours reads YAML).

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use serde_json::Value;

/// Exit code of `hack/helm.sh` where there is none to be had.
const UNAVAILABLE: i32 = 75;

pub(crate) struct Helm(PathBuf);

impl Helm {
    /// Helm, or `None` after printing why there is none here.
    pub(crate) fn get() -> Option<Self> {
        let output = Command::new(Path::new(env!("CARGO_MANIFEST_DIR")).join("hack/helm.sh")).output().unwrap();
        if output.status.code() == Some(UNAVAILABLE) {
            println!("skipped: {}", String::from_utf8_lossy(&output.stderr).lines().last().unwrap_or("no helm"));
            return None;
        }
        assert!(output.status.success(), "{output:?}");
        Some(Self(Path::new(String::from_utf8(output.stdout).unwrap().trim()).join("bin/helm")))
    }

    fn run(&self, arguments: &[&str], chart: &Path, values: &[&str]) -> Result<String, String> {
        self.run_in("kube-system", arguments, chart, values)
    }

    fn run_in(&self, namespace: &str, arguments: &[&str], chart: &Path, values: &[&str]) -> Result<String, String> {
        let mut command = Command::new(&self.0);
        command.args(arguments).arg(chart).args(["--namespace", namespace]);
        for value in values {
            command.args(["--set", value]);
        }
        let Output { status, stdout, stderr } = command.output().map_err(|e| e.to_string())?;
        let stdout = String::from_utf8(stdout).map_err(|e| e.to_string())?;
        if status.success() { Ok(stdout) } else { Err(format!("{stdout}{}", String::from_utf8_lossy(&stderr))) }
    }

    pub(crate) fn lint(&self, values: &[&str]) -> Result<String, String> {
        self.run(&["lint", "--strict"], &chart(), values)
    }

    /// The chart's objects with these `--set`s.
    pub(crate) fn template(&self, values: &[&str]) -> Result<Vec<Value>, String> {
        self.documents(&self.run(&["template", "dranic"], &chart(), values)?)
    }

    /// As [`Self::template`], for another namespace.
    pub(crate) fn template_in(&self, namespace: &str, values: &[&str]) -> Result<Vec<Value>, String> {
        self.documents(&self.run_in(namespace, &["template", "dranic"], &chart(), values)?)
    }

    /// The objects of a YAML stream.
    pub(crate) fn documents(&self, text: &str) -> Result<Vec<Value>, String> {
        let said_something = |text: &&str| text.lines().any(|line| !line.trim().is_empty() && !line.starts_with('#'));
        let documents: Vec<String> = format!("\n{text}").split("\n---").filter(said_something).map(str::to_owned).collect();
        self.json(&documents)
    }

    /// Each YAML text as JSON: a scratch chart whose one template prints its files.
    pub(crate) fn json(&self, texts: &[String]) -> Result<Vec<Value>, String> {
        const TEMPLATE: &str = r#"{{- $all := list }}
{{- range $path, $text := .Files.Glob "files/*" }}{{ $all = append $all (fromYaml (toString $text)) }}{{ end }}
{{ dict "apiVersion" "v1" "kind" "All" "all" $all | toJson }}"#;
        let scratch = tempfile::tempdir().map_err(|e| e.to_string())?;
        let chart = scratch.path().join("json");
        let put = |file: String, text: &str| -> std::io::Result<()> {
            let path = chart.join(file);
            std::fs::create_dir_all(path.parent().unwrap())?;
            std::fs::write(path, text)
        };
        put("Chart.yaml".to_owned(), "{apiVersion: v2, name: json, version: 1.0.0}").map_err(|e| e.to_string())?;
        put("templates/all.yaml".to_owned(), TEMPLATE).map_err(|e| e.to_string())?;
        for (number, text) in texts.iter().enumerate() {
            put(format!("files/{number:04}.yaml"), text).map_err(|e| e.to_string())?;
        }
        let output = self.run(&["template", "json"], &chart, &[])?;
        let line = output.lines().find(|line| line.starts_with('{')).ok_or_else(|| format!("no JSON: {output}"))?;
        let all: Value = serde_json::from_str(line).map_err(|e| e.to_string())?;
        let all = all["all"].as_array().cloned().unwrap_or_default();
        match all.iter().find_map(|object| object["Error"].as_str()) {
            Some(error) => Err(format!("not YAML: {error}")),
            None if all.len() == texts.len() => Ok(all),
            None => Err(format!("{} texts gave {} objects", texts.len(), all.len())),
        }
    }
}

fn chart() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("charts/dranic")
}
