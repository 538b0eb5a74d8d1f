{{/* A pod: the same for all processes but for the command, the ports and what asks whether it is well. */}}

{{- define "headwater.pod" -}}
{{- $root := .root -}}
{{- with $root.Values -}}
metadata:
  labels:
    {{- include "headwater.labels" $root | nindent 4 }}
  annotations:
    checksum/config: {{ include "headwater.config" $root | sha256sum }}
    {{- with .podAnnotations }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
spec:
  # Kubernetes' variables for Services called headwater-… begin with HEADWATER_, where an unknown name ends start-up.
  enableServiceLinks: false
  serviceAccountName: {{ include "headwater.name" $root }}
  automountServiceAccountToken: {{ $.automountToken | default false }}
  terminationGracePeriodSeconds: {{ $.terminationGraceSeconds }}
  securityContext:
    runAsNonRoot: true
    runAsUser: 10001
    runAsGroup: 10001
    fsGroup: 10001
    seccompProfile: {type: RuntimeDefault}
  {{- with .imagePullSecrets }}
  imagePullSecrets:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .priorityClassName }}
  priorityClassName: {{ . }}
  {{- end }}
  {{- with .runtimeClassName }}
  runtimeClassName: {{ . }}
  {{- end }}
  {{- with .nodeSelector }}
  nodeSelector:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .tolerations }}
  tolerations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .affinity }}
  affinity:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- if $.spread }}
  topologySpreadConstraints: # zones first, since one of them may be lost; then nodes
    {{- range $key := list "topology.kubernetes.io/zone" "kubernetes.io/hostname" }}
    - maxSkew: 1
      topologyKey: {{ $key }}
      whenUnsatisfiable: ScheduleAnyway
      labelSelector:
        matchLabels:
          {{- include "headwater.selector" $root | nindent 10 }}
    {{- end }}
  {{- end }}
  containers:
    - name: headwater
      image: {{ printf "%s:%s" .image.repository (.image.tag | default $root.Chart.AppVersion) | quote }}
      imagePullPolicy: {{ .image.pullPolicy }}
      args: [{{ $.command }}, --config, /etc/headwater/config.yaml]
      env:
        {{- include "headwater.environment" $root | nindent 8 }}
        {{- with $.environment }}
        {{- . | nindent 8 }}
        {{- end }}
      ports:
        {{- range $name, $port := $.ports }}
        - {name: {{ $name }}, containerPort: {{ $port }}, protocol: TCP}
        {{- end }}
      {{- $.probes | nindent 6 }}
      {{- with $.preStopSeconds }}
      lifecycle: # until everyone who sends here has heard that this pod is leaving
        preStop: {sleep: {seconds: {{ . }}}}
      {{- end }}
      resources:
        {{- toYaml .resources | nindent 8 }}
      securityContext:
        allowPrivilegeEscalation: false
        readOnlyRootFilesystem: true
        capabilities: {drop: [ALL]}
      volumeMounts:
        - {name: config, mountPath: /etc/headwater, readOnly: true}
        {{- range $name, $secret := .secretFiles }}
        - {name: {{ $name }}, mountPath: /etc/headwater-secrets/{{ $name }}, readOnly: true}
        {{- end }}
        {{- with .extraVolumeMounts }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
  volumes:
    - name: config
      configMap: {name: {{ include "headwater.name" $root }}}
    {{- range $name, $secret := .secretFiles }}
    - name: {{ $name }}
      secret: {secretName: {{ $secret }}, defaultMode: 0440}
    {{- end }}
    {{- with .extraVolumes }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
{{- end -}}
{{- end -}}
