{{- define "dranic.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" -}}
{{- end -}}

{{- /* The objects' name: the release's, with the chart's name unless that is part of it. */ -}}
{{- define "dranic.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 63 | trimSuffix "-" -}}
{{- else if contains (include "dranic.name" .) .Release.Name -}}
{{- .Release.Name | trunc 63 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name (include "dranic.name" .) | trunc 63 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "dranic.serviceAccountName" -}}
{{- if .Values.serviceAccount.create -}}
{{- default (include "dranic.fullname" .) .Values.serviceAccount.name -}}
{{- else -}}
{{- required "serviceAccount.name is needed where serviceAccount.create is false" .Values.serviceAccount.name -}}
{{- end -}}
{{- end -}}

{{- define "dranic.selectorLabels" -}}
app.kubernetes.io/name: {{ include "dranic.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "dranic.labels" -}}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" | trunc 63 | trimSuffix "-" }}
{{ include "dranic.selectorLabels" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end -}}

{{- define "dranic.image" -}}
{{- if .Values.image.digest -}}
{{- printf "%s@%s" .Values.image.repository .Values.image.digest -}}
{{- else -}}
{{- printf "%s:%s" .Values.image.repository (default .Chart.AppVersion .Values.image.tag) -}}
{{- end -}}
{{- end -}}

{{- /* IP:port or [IP]:port. */ -}}
{{- define "dranic.httpAddress" -}}
{{- $address := .Values.http.address -}}
{{- if contains ":" $address -}}
{{- printf "[%s]:%v" $address .Values.http.port -}}
{{- else -}}
{{- printf "%s:%v" $address .Values.http.port -}}
{{- end -}}
{{- end -}}

{{- define "dranic.httpIsLoopback" -}}
{{- if or (hasPrefix "127." .Values.http.address) (eq .Values.http.address "::1") -}}true{{- end -}}
{{- end -}}

{{- /* What the kubelet asks: itself on this host, whatever the node's address is. */ -}}
{{- define "dranic.probeHost" -}}
{{- get (dict "0.0.0.0" "127.0.0.1" "::" "::1") .Values.http.address | default .Values.http.address -}}
{{- end -}}

{{- /* One argument each; null is left out, an empty string is not. */ -}}
{{- define "dranic.args" -}}
- agent
{{- $agent := .Values.agent }}
{{- range list
    (list "driver-name" .Values.driverName)
    (list "kubelet-root" .Values.kubeletRoot)
    (list "nri-socket" $agent.nriSocket)
    (list "nri" $agent.nri)
    (list "nri-index" $agent.nriIndex)
    (list "nri-margin" $agent.nriMargin)
    (list "nri-margin-percent" $agent.nriMarginPercent)
    (list "on-overrun" $agent.onOverrun)
    (list "hold" $agent.hold)
    (list "on-missed-sandbox" $agent.onMissedSandbox)
    (list "share-slots" $agent.shareSlots)
    (list "share" $agent.share)
    (list "rescan" $agent.rescan)
    (list "wait-for-device" $agent.waitForDevice)
    (list "dhcp-timeout" $agent.dhcpTimeout)
    (list "rdma-timeout" $agent.rdmaTimeout)
    (list "verbs" (ternary "on" "off" .Values.verbs.enabled))
    (list "state-dir" $agent.stateDir)
    (list "cdi-dir" $agent.cdiDir)
    (list "guard-dir" $agent.guardDir)
    (list "guard-wait" $agent.guardWait)
    (list "netns-dir" $agent.netnsDir)
    (list "sysctl-dir" "/host/proc/sys/net")
    (list "bpffs" $agent.bpffs)
    (list "dev" "/host/dev")
    (list "http-address" (include "dranic.httpAddress" .))
    (list "log-format" $agent.logFormat)
    (list "log-level" $agent.logLevel)
}}
{{- if not (kindIs "invalid" (index . 1)) }}
- {{ printf "--%s=%v" (index . 0) (index . 1) | quote }}
{{- end }}
{{- end }}
{{- range $agent.extraArgs }}
- {{ . | quote }}
{{- end }}
{{- end -}}

{{- /* Opening RDMA devices takes a privileged container: the device cgroup of others knows only devices that were there at their start. */ -}}
{{- define "dranic.securityContext" -}}
{{- $context := .Values.securityContext | default dict }}
{{- if .Values.verbs.enabled }}
{{- $context = mergeOverwrite (deepCopy $context) (dict "privileged" true "allowPrivilegeEscalation" true) }}
{{- end }}
{{- with $context }}
{{- toYaml . }}
{{- end }}
{{- end -}}

{{- /* A probe: where (dict "root" $ "path" ... "times" ...). */ -}}
{{- define "dranic.probe" -}}
httpGet:
  host: {{ include "dranic.probeHost" .root | quote }}
  path: {{ .path }}
  port: {{ .root.Values.http.port }}
{{ toYaml .times }}
{{- end -}}
