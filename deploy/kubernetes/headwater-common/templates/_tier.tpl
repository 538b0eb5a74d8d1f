{{/* A tier: a balancer in front of clients or of the tier above. Called with the root and the command. */}}

{{- define "headwater.config.tier" -}}
{{- if hasKey .Values.config "drain" -}}
{{- fail "config.drain: set drain.graceSeconds instead, which the pod's time to end is made of" -}}
{{- end -}}
listen: 0.0.0.0:8080
admin: 0.0.0.0:9080
reports: {listen: "0.0.0.0:9090"}
log: {format: json}
drain: {grace_s: {{ .Values.drain.graceSeconds }}}
{{- end -}}

{{- define "headwater.tier" -}}
{{- $root := .root -}}
{{- $values := $root.Values -}}
{{- $ports := mustMerge (dict "http" 8080 "admin" 9080 "reports" 9090) (.ports | default dict) -}}
{{- $probes := include "headwater.probes.tier" $root -}}
{{- $grace := add $values.drain.preStopSeconds (ceil $values.drain.graceSeconds) 5 -}}
{{- $pod := dict "root" $root "command" .command "ports" $ports "probes" $probes "spread" true
  "terminationGraceSeconds" $grace "preStopSeconds" $values.drain.preStopSeconds -}}
apiVersion: apps/v1
kind: Deployment
metadata:
  {{- include "headwater.metadata" $root | nindent 2 }}
spec:
  {{- if not (or $values.autoscaling.hpa.enabled $values.autoscaling.keda.enabled) }}
  replicas: {{ $values.replicas }}
  {{- end }}
  revisionHistoryLimit: 3
  selector:
    matchLabels:
      {{- include "headwater.selector" $root | nindent 6 }}
  strategy: # the new one serves before the old one leaves
    rollingUpdate: {maxSurge: 1, maxUnavailable: 0}
  template:
    {{- include "headwater.pod" $pod | nindent 4 }}
---
{{ include "headwater.configmap" $root }}
---
{{ include "headwater.serviceaccount" $root }}
---
{{ include "headwater.service" (dict "root" $root "ports" $ports) }}
---
{{ include "headwater.admin" $root }}
{{- if $values.podDisruptionBudget.enabled }}
---
{{ include "headwater.pdb" $root }}
{{- end }}
{{- include "headwater.autoscaling" $root }}
{{- if $values.networkPolicy.enabled }}
---
{{ include "headwater.networkpolicy" (dict "root" $root "ports" $ports) }}
{{- end }}
{{- if $values.serviceMonitor.enabled }}
---
{{ include "headwater.servicemonitor" $root }}
{{- end }}
{{- end -}}

{{/* How the admin port is spoken to; a kubelet does not check the certificate. */}}
{{- define "headwater.adminscheme" -}}
{{- if (.Values.config.tls | default dict).admin -}}HTTPS{{- else -}}HTTP{{- end -}}
{{- end -}}

{{- define "headwater.probes.tier" -}}
{{- $scheme := include "headwater.adminscheme" . -}}
startupProbe: # it listens once it has heard what there is
  httpGet: {path: /readyz, port: admin, scheme: {{ $scheme }}}
  periodSeconds: 1
  failureThreshold: 60
readinessProbe:
  httpGet: {path: /readyz, port: admin, scheme: {{ $scheme }}}
  periodSeconds: 5
  timeoutSeconds: 2
  failureThreshold: 2
livenessProbe: # asks for the process and for nothing it depends on: a restart mends no etcd
  httpGet: {path: /livez, port: admin, scheme: {{ $scheme }}}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 6
{{- end -}}

{{- define "headwater.serviceaccount" -}}
apiVersion: v1
kind: ServiceAccount
metadata:
  {{- include "headwater.metadata" . | nindent 2 }}
automountServiceAccountToken: false
{{- end -}}

{{- define "headwater.service" -}}
{{- $root := .root -}}
apiVersion: v1
kind: Service
metadata:
  {{- include "headwater.metadata" $root | nindent 2 }}
  {{- with $root.Values.service.annotations }}
  annotations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  type: {{ $root.Values.service.type }}
  {{- if and (ne $root.Values.service.type "ClusterIP") $root.Values.service.externalTrafficPolicy }}
  externalTrafficPolicy: {{ $root.Values.service.externalTrafficPolicy }}
  {{- end }}
  selector:
    {{- include "headwater.selector" $root | nindent 4 }}
  ports: # for clients; tiers find each other in etcd, pod by pod
    - {name: http, port: {{ $root.Values.service.port }}, targetPort: http, protocol: TCP}
    {{- range $name, $port := omit .ports "http" "admin" "reports" }}
    - {name: {{ $name }}, port: {{ $port }}, targetPort: {{ $name }}, protocol: TCP, appProtocol: kubernetes.io/h2c}
    {{- end }}
{{- end -}}

{{- define "headwater.pdb" -}}
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata:
  {{- include "headwater.metadata" . | nindent 2 }}
spec:
  maxUnavailable: {{ .Values.podDisruptionBudget.maxUnavailable }}
  unhealthyPodEvictionPolicy: AlwaysAllow # one that does not work may go
  selector:
    matchLabels:
      {{- include "headwater.selector" . | nindent 6 }}
{{- end -}}

{{- define "headwater.autoscaling" -}}
{{- with .Values.autoscaling }}
{{- if and .hpa.enabled .keda.enabled }}
{{- fail "autoscaling: hpa and keda exclude each other, KEDA makes an HPA itself" }}
{{- end }}
{{- if .hpa.enabled }}
---
apiVersion: autoscaling/v2
kind: HorizontalPodAutoscaler
metadata:
  {{- include "headwater.metadata" $ | nindent 2 }}
spec:
  scaleTargetRef: {apiVersion: apps/v1, kind: Deployment, name: {{ include "headwater.name" $ }}}
  minReplicas: {{ .minReplicas }}
  maxReplicas: {{ .maxReplicas }}
  metrics:
    - type: Resource
      resource: {name: cpu, target: {type: Utilization, averageUtilization: {{ .hpa.cpuUtilizationPercent }}}}
    {{- with .hpa.inFlightRequests }}
    - type: Pods # by an adapter that makes Prometheus' metrics known to Kubernetes
      pods:
        metric: {name: headwater_in_flight_requests}
        target: {type: AverageValue, averageValue: {{ . | quote }}}
    {{- end }}
  behavior: # up at once; down slowly, as each pod that leaves has streams to end
    scaleUp: {stabilizationWindowSeconds: 0}
    scaleDown:
      stabilizationWindowSeconds: 300
      policies: [{type: Pods, value: 1, periodSeconds: 60}]
{{- end }}
{{- if .keda.enabled }}
---
apiVersion: keda.sh/v1alpha1
kind: ScaledObject
metadata:
  {{- include "headwater.metadata" $ | nindent 2 }}
spec:
  scaleTargetRef: {apiVersion: apps/v1, kind: Deployment, name: {{ include "headwater.name" $ }}}
  minReplicaCount: {{ .minReplicas }}
  maxReplicaCount: {{ .maxReplicas }}
  pollingInterval: 15
  cooldownPeriod: 300
  triggers:
    - type: prometheus
      metadata:
        serverAddress: {{ required "autoscaling.keda.prometheus is needed: its URL" .keda.prometheus }}
        query: sum(headwater_in_flight_requests{namespace={{ $.Release.Namespace | quote }},service="{{ include "headwater.name" $ }}-admin"})
        threshold: {{ .keda.inFlightRequests | quote }}
    - type: cpu
      metricType: Utilization
      metadata: {value: {{ .hpa.cpuUtilizationPercent | quote }}}
{{- end }}
{{- end }}
{{- end -}}

{{/* Apart from the Service for clients, which may be public: this one is for who watches and operates. */}}
{{- define "headwater.admin" -}}
apiVersion: v1
kind: Service
metadata:
  name: {{ include "headwater.name" . }}-admin
  namespace: {{ .Release.Namespace }}
  labels:
    {{- include "headwater.labels" . | nindent 4 }}
    headwater/port: admin
spec:
  clusterIP: None
  publishNotReadyAddresses: true # one that is not ready is the one to look at
  selector:
    {{- include "headwater.selector" . | nindent 4 }}
  ports:
    - {name: admin, port: 9080, targetPort: admin, protocol: TCP}
{{- end -}}

{{- define "headwater.servicemonitor" -}}
apiVersion: monitoring.coreos.com/v1
kind: ServiceMonitor
metadata:
  {{- include "headwater.metadata" . | nindent 2 }}
    {{- with .Values.serviceMonitor.labels }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
spec:
  selector:
    matchLabels:
      {{- include "headwater.selector" . | nindent 6 }}
      headwater/port: admin
  endpoints:
    - port: admin
      path: /metrics
      interval: {{ .Values.serviceMonitor.interval }}
      scheme: {{ include "headwater.adminscheme" . | lower }}
      {{- with .Values.serviceMonitor.endpoint }}
      {{- toYaml . | nindent 6 }}
      {{- end }}
{{- end -}}

{{/* Tiers, agents and operators of one system are told apart from others by app.kubernetes.io/part-of. */}}
{{- define "headwater.networkpolicy" -}}
{{- $root := .root -}}
{{- $policy := $root.Values.networkPolicy -}}
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata:
  {{- include "headwater.metadata" $root | nindent 2 }}
spec:
  podSelector:
    matchLabels:
      {{- include "headwater.selector" $root | nindent 6 }}
  policyTypes: [Ingress, Egress]
  ingress:
    - from:
        - namespaceSelector: {}
          podSelector: {matchLabels: {app.kubernetes.io/part-of: headwater}}
      ports:
        {{- range $name, $port := .ports }}
        - {port: {{ $name }}, protocol: TCP}
        {{- end }}
    {{- if hasKey .ports "http" }}
    - ports: # clients
        {{- range $name, $port := omit .ports "admin" "reports" }}
        - {port: {{ $name }}, protocol: TCP}
        {{- end }}
      {{- with $policy.clients }}
      from:
        {{- toYaml . | nindent 8 }}
      {{- end }}
    {{- end }}
    {{- with and (hasKey .ports "admin") $policy.monitoring }}
    - ports: [{port: admin, protocol: TCP}]
      from:
        {{- toYaml . | nindent 8 }}
    {{- end }}
  egress:
    - to:
        - namespaceSelector: {}
          podSelector: {matchLabels: {app.kubernetes.io/part-of: headwater}}
    - ports: [{port: 53, protocol: UDP}, {port: 53, protocol: TCP}]
    - ports: # etcd, Redis, servers, collectors
        {{- range $policy.egressPorts }}
        - {port: {{ . }}, protocol: TCP}
        {{- end }}
    {{- with $policy.extraEgress }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
{{- end -}}
