{{- define "kv-router.name" -}}
{{- $name := .Release.Name -}}
{{- if not (contains "kv-router" $name) }}{{ $name = printf "%s-kv-router" $name }}{{ end -}}
{{- $name | trunc 52 | trimSuffix "-" -}}
{{- end -}}

{{- define "kv-router.selector" -}}
app.kubernetes.io/name: kv-router
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "kv-router.valkey" -}}
app.kubernetes.io/name: kv-router-valkey
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "kv-router.test" -}}
app.kubernetes.io/name: kv-router-test
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "kv-router.labels" -}}
{{ include "kv-router.selector" . }}
app.kubernetes.io/version: {{ .Values.image.tag | default .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end -}}

{{- define "kv-router.engines" -}}
{{ .Values.engines.namespace | default .Release.Namespace }}/{{ required "engines.service: name the Service of the engines" .Values.engines.service }}
{{- with .Values.engines.port }}:{{ . }}{{ end }}
{{- end -}}

{{- define "kv-router.container" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end -}}

{{- define "kv-router.caddyfile" -}}
{
	admin localhost:2019
	persist_config off
	metrics
	log {
		format filter {
			request>headers>X-Api-Key delete
		}
	}
	# A router that ends serves on until no balancer sends to it any more.
	shutdown_delay 10s
}

:9180 {
	metrics /metrics
	@ending vars {http.shutting_down} true
	respond @ending 503
	respond /healthz 200
}

:8080 {
	log
	kv_router_ready /ready
	@odd vars_regexp {http.request.uri.path} (^|/)[.][.]?(/|$)|//
	respond @odd 400
{{- if not .Values.apiKey.allowAnonymous }}
	vars api_key {$KV_ROUTER_API_KEY}
	map {header.Authorization} {key} {
		"~(?i)^Bearer (.+)$" "${1}"
		default {header.X-Api-Key}
	}
	@open {
		method GET HEAD
		vars {http.request.uri.path} /health
	}
	request_body @open {
		max_size 1
	}
	@keyless {
		not {
			method GET HEAD
			vars {http.request.uri.path} /health
		}
		vars {key} ""
	}
	respond @keyless 401
	@unknown {
		not {
			method GET HEAD
			vars {http.request.uri.path} /health
		}
		not vars {key} {vars.api_key}
	}
	respond @unknown `{"error":{"message":"wrong API key","type":"invalid_request_error","code":"invalid_api_key"}}` 401
{{- end }}
	@refused not path {{ join " " .Values.paths }}
	respond @refused `{"error":{"message":"no such path","type":"invalid_request_error","code":"not_found"}}` 404
{{- with .Values.site }}
{{ . | trim | indent 4 }}
{{- end }}
	kv_router {
{{- if .Values.share.enabled }}
		share {{ .Values.share.server | default (printf "valkey://%s-valkey:6379" (include "kv-router.name" .)) }} {
{{- if .Values.share.passwordSecret }}
			password {env.VALKEY_PASSWORD}
{{- end }}
			prefix kv_router:{{ .Release.Namespace }}:{{ .Release.Name }}:
		}
{{- end }}
		queue {
			max_waiting {{ .Values.queue.maxWaiting }}
			max_wait {{ .Values.queue.maxWait }}
		}
{{- with .Values.options }}
{{ . | trim | indent 8 }}
{{- end }}
		reverse_proxy {
			dynamic endpointslices {{ include "kv-router.engines" . }}
{{- with .Values.reverseProxy }}
{{ . | trim | indent 12 }}
{{- end }}
		}
	}
}
{{- end -}}
