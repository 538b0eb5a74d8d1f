{{/* Configuration: one file, out of what the chart knows and what `config` says, which wins. */}}

{{- define "headwater.config" -}}
{{- $place := dict -}}
{{- if hasKey .Values "region" -}}
{{- $_ := set $place "region" (required "region is needed: where this tier stands" .Values.region) -}}
{{- end -}}
{{- if hasKey .Values "cluster" -}}
{{- $_ := set $place "cluster" (required "cluster is needed: where this tier stands" .Values.cluster) -}}
{{- end -}}
{{- $own := include "headwater.config.own" . | fromYaml -}}
{{- if not (dig "etcd" "urls" false .Values.config) -}}
{{- fail "config.etcd.urls is needed: several processes find each other there" -}}
{{- end -}}
{{- mustMergeOverwrite $own $place .Values.config | toYaml -}}
{{- end -}}

{{- define "headwater.configmap" -}}
apiVersion: v1
kind: ConfigMap
metadata:
  {{- include "headwater.metadata" . | nindent 2 }}
data:
  config.yaml: |
    {{- include "headwater.config" . | nindent 4 }}
{{- end -}}

{{/* What a pod reads of itself; a list or map of the configuration is YAML in the environment as well. */}}
{{- define "headwater.environment" -}}
- name: HEADWATER_ID
  valueFrom: {fieldRef: {fieldPath: metadata.name}}
- name: HEADWATER_ADVERTISE
  {{- if .Values.advertise }}
  value: {{ .Values.advertise | quote }}
  {{- else }}
  valueFrom: {fieldRef: {fieldPath: status.podIP}}
  {{- end }}
{{- range $name, $from := .Values.secretEnvironment }}
- name: {{ $name }}
  valueFrom:
    secretKeyRef: {{ toJson $from }}
{{- end }}
{{- with .Values.extraEnvironment }}
{{ toYaml . }}
{{- end }}
{{- end -}}
