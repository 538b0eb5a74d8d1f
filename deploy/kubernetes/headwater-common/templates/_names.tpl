{{/* Names and labels. A release is named for where it stands, as in eu or eu-a, since one is installed for each node. */}}

{{- define "headwater.name" -}}
{{- $name := .Values.nameOverride | default .Chart.Name -}}
{{- if contains $name .Release.Name -}}
{{- .Release.Name | trunc 45 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name $name | trunc 45 | trimSuffix "-" -}}{{/* the id of a balancer is its pod's name: at most 64 */}}
{{- end -}}
{{- end -}}

{{- define "headwater.selector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "headwater.labels" -}}
{{ include "headwater.selector" . }}
app.kubernetes.io/part-of: headwater
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- with .Values.labels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "headwater.metadata" -}}
name: {{ include "headwater.name" . }}
namespace: {{ .Release.Namespace }}
labels:
  {{- include "headwater.labels" . | nindent 2 }}
{{- end -}}
