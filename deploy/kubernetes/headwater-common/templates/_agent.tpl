{{/* The agent: on each node for the servers of that node, or once for all of them. */}}

{{- define "headwater.agent" -}}
{{- $values := .Values -}}
{{- if not (has $values.kind (list "DaemonSet" "Deployment")) -}}
{{- fail "kind must be DaemonSet or Deployment" -}}
{{- end -}}
{{- $ports := dict "reports" 9090 -}}
{{- $node := "" -}}
{{- if eq $values.kind "DaemonSet" -}}
{{- $node = "- name: HEADWATER_DISCOVERY__NODE\n  valueFrom: {fieldRef: {fieldPath: spec.nodeName}}" -}}
{{- end -}}
{{- $pod := dict "root" . "command" "agent" "ports" $ports "probes" (include "headwater.probes.agent" .)
  "environment" $node "automountToken" true "terminationGraceSeconds" 15 -}}
apiVersion: apps/v1
kind: {{ $values.kind }}
metadata:
  {{- include "headwater.metadata" . | nindent 2 }}
spec:
  revisionHistoryLimit: 3
  selector:
    matchLabels:
      {{- include "headwater.selector" . | nindent 6 }}
  {{- if eq $values.kind "DaemonSet" }}
  updateStrategy: # servers are absent while their agent is: one node at a time
    rollingUpdate: {maxUnavailable: 1}
  {{- else }}
  replicas: 1 # two would register the same servers
  strategy: {type: Recreate}
  {{- end }}
  template:
    {{- include "headwater.pod" $pod | nindent 4 }}
---
{{ include "headwater.configmap" . }}
---
{{ include "headwater.serviceaccount" . }}
{{- $namespaces := dict }}
{{- range $values.servers }}
{{- $_ := set $namespaces (.namespace | default $.Release.Namespace) true }}
{{- end }}
{{- range $namespace := keys $namespaces | sortAlpha }}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: Role
metadata:
  name: {{ include "headwater.name" $ }}
  namespace: {{ $namespace }}
  labels:
    {{- include "headwater.labels" $ | nindent 4 }}
rules:
  - {apiGroups: [discovery.k8s.io], resources: [endpointslices], verbs: [get, list, watch]}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: RoleBinding
metadata:
  name: {{ include "headwater.name" $ }}
  namespace: {{ $namespace }}
  labels:
    {{- include "headwater.labels" $ | nindent 4 }}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: Role, name: {{ include "headwater.name" $ }}}
subjects:
  - {kind: ServiceAccount, name: {{ include "headwater.name" $ }}, namespace: {{ $.Release.Namespace }}}
{{- end }}
{{- if $values.networkPolicy.enabled }}
---
{{ include "headwater.networkpolicy" (dict "root" . "ports" $ports) }}
{{- end }}
{{- end -}}

{{- define "headwater.probes.agent" -}}
readinessProbe:
  tcpSocket: {port: reports}
  periodSeconds: 10
livenessProbe:
  tcpSocket: {port: reports}
  periodSeconds: 10
  failureThreshold: 6
{{- end -}}
