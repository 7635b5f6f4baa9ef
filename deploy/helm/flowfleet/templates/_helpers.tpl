{{/* Names. The longest object name is "<fullname>-rollout-<pool>": 30 + 9 + 24 characters. */}}
{{- define "flowfleet.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 30 | trimSuffix "-" }}
{{- end }}

{{- define "flowfleet.fullname" -}}
{{- if .Values.fullnameOverride }}
{{- .Values.fullnameOverride | trunc 30 | trimSuffix "-" }}
{{- else if contains (include "flowfleet.name" .) .Release.Name }}
{{- .Release.Name | trunc 30 | trimSuffix "-" }}
{{- else }}
{{- printf "%s-%s" .Release.Name (include "flowfleet.name" .) | trunc 30 | trimSuffix "-" }}
{{- end }}
{{- end }}

{{/* Part of an object's name that stands for a reward: Kubernetes takes no underscores. */}}
{{- define "flowfleet.suffix" -}}
{{- . | replace "_" "-" }}
{{- end }}

{{/* Labels that select the pods of a component: (list root component). */}}
{{- define "flowfleet.selector" -}}
{{- $root := index . 0 -}}
app.kubernetes.io/name: {{ include "flowfleet.name" $root }}
app.kubernetes.io/instance: {{ $root.Release.Name }}
app.kubernetes.io/component: {{ index . 1 }}
{{- end }}

{{/* Labels of a pod: (list root component podLabels). None that an upgrade of the chart alone would change. */}}
{{- define "flowfleet.podLabels" -}}
{{- $root := index . 0 -}}
{{ include "flowfleet.selector" . }}
app.kubernetes.io/part-of: flowfleet
app.kubernetes.io/managed-by: {{ $root.Release.Service }}
{{- with $root.Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- with index . 2 }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* Labels of an object: (list root component). */}}
{{- define "flowfleet.labels" -}}
{{- $root := index . 0 -}}
helm.sh/chart: {{ printf "%s-%s" $root.Chart.Name ($root.Chart.Version | replace "+" "_") }}
{{ include "flowfleet.selector" . }}
app.kubernetes.io/part-of: flowfleet
app.kubernetes.io/version: {{ $root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ $root.Release.Service }}
{{- with $root.Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* "annotations:" of an object, where it has any: (list root annotations). */}}
{{- define "flowfleet.annotations" -}}
{{- $root := index . 0 -}}
{{- with merge (dict) (index . 1) $root.Values.commonAnnotations -}}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{/* Settings of one pool or reward, written into the first: (list result defaults own). Gives no text. */}}
{{- define "flowfleet.settings" -}}
{{- $result := index . 0 }}
{{- range $key, $value := index . 1 }}
{{- $_ := set $result $key (kindIs "map" $value | ternary (deepCopy $value) $value) }}
{{- end }}
{{- range $key, $value := index . 2 }}
{{- if has $key (list "autoscaling" "podDisruptionBudget") }}
{{- range $name, $inner := $value }}
{{- $_ := set (get $result $key) $name $inner }}
{{- end }}
{{- else }}
{{- $_ := set $result $key $value }}
{{- end }}
{{- end }}
{{- end }}

{{/* Reference of one of the images: (list root key of `images`). One with a digest takes no tag. */}}
{{- define "flowfleet.image" -}}
{{- $images := (index . 0).Values.images -}}
{{- $name := get $images (index . 1) | default (regexReplaceAll "([A-Z])" (printf "flowfleet-%s" (index . 1)) "-${1}" | lower) -}}
{{- with $images.registry }}{{ trimSuffix "/" . }}/{{ end -}}
{{ $name }}{{ if not (contains "@" $name) }}:{{ $images.tag | default (index . 0).Chart.AppVersion }}{{ end }}
{{- end }}

{{/* Key of `images` for a scorer: files/scorers.yaml lists the images of several scorers. A scorer with a library of its
own has an image of its own, named after it: (list root scorer). */}}
{{- define "flowfleet.scorerImage" -}}
{{- $scorer := toString (index . 1 | default "") -}}
{{- $key := empty $scorer | ternary "reward" (printf "reward%s" ($scorer | replace "_" " " | title | nospace)) -}}
{{- range $image, $scorers := ((index . 0).Files.Get "files/scorers.yaml" | fromYaml).images -}}
{{- if has $scorer $scorers }}{{ $key = $image }}{{ end -}}
{{- end -}}
{{- $key }}
{{- end }}

{{/* Image of a reward, its own or its scorer's: (list root reward). */}}
{{- define "flowfleet.rewardImage" -}}
{{- $root := index . 0 }}{{ $reward := index . 1 -}}
{{- $reward.image | default (include "flowfleet.image" (list $root (include "flowfleet.scorerImage" (list $root $reward.scorer)))) }}
{{- end }}

{{- define "flowfleet.rewardDir" -}}/etc/flowfleet/reward{{- end }}

{{/* What a reward reads from its ConfigMap, by file name; "" for nothing: (list root reward judges by name). JSON, for
YAML would write large numbers as 1e+06. */}}
{{- define "flowfleet.rewardFiles" -}}
{{- $root := index . 0 }}{{ $reward := index . 1 }}{{ $judges := index . 2 }}
{{- $settings := deepCopy $reward.settings }}
{{- if and $reward.judges (has $reward.scorer ($root.Files.Get "files/scorers.yaml" | fromYaml).judges) }}
{{- $urls := list }}
{{- range $reward.judges }}
{{- $urls = append $urls (printf "http://%s-judge-%s:8000/v1" (include "flowfleet.fullname" $root) .) }}
{{- end }}
{{- $first := get $judges (first $reward.judges) | default dict }}
{{- $settings = merge $settings (dict "urls" $urls "model" ($first.servedModelName | default (first $reward.judges))) }}
{{- end }}
{{- if $settings }}
settings.json: {{ toPrettyJson $settings | quote }}
{{- end }}
{{- range $name, $text := $reward.files }}
{{ $name }}: {{ quote $text }}
{{- end }}
{{- end }}

{{/* Judges by name with the defaults filled in, written into the first: (list result root). Gives no text. */}}
{{- define "flowfleet.judges" -}}
{{- $result := index . 0 }}{{ $root := index . 1 }}
{{- range $own := $root.Values.judges }}
{{- $judge := dict }}{{ include "flowfleet.settings" (list $judge $root.Values.judge $own) }}
{{- $_ := set $result $own.name $judge }}
{{- end }}
{{- end }}

{{/* What a backend means for torch: FLOWFLEET_DEVICE. (list root accelerators) */}}
{{- define "flowfleet.device" -}}
{{- $backend := (index . 0).Values.accelerator.backend -}}
{{- if index . 1 }}{{ get (dict "nccl" "cuda" "hccl" "npu" "gloo" "cpu") $backend }}{{ else }}cpu{{ end }}
{{- end }}

{{/* Whether resources name an accelerator, as nvidia.com/gpu: "true" or "". (resources) */}}
{{- define "flowfleet.extended" -}}
{{- range $name, $_ := .limits }}{{ if contains "/" $name }}true{{ end }}{{ end }}
{{- end }}

{{/* Security. */}}
{{- define "flowfleet.podSecurityContext" -}}
{{- $root := index . 0 -}}
runAsNonRoot: true
{{- range $key := list "runAsUser" "runAsGroup" "fsGroup" }}
{{- $value := get $root.Values.podSecurity $key }}
{{- if not (kindIs "invalid" $value) }}{{ if ne (toString $value) "" }}
{{ $key }}: {{ int64 $value }}
{{- end }}{{ end }}
{{- end }}
fsGroupChangePolicy: OnRootMismatch
{{- with index . 1 }}
supplementalGroups: {{ toJson . }}
{{- end }}
seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- define "flowfleet.securityContext" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end }}

{{/* Where pods go: (list root settings selectorLabels accelerators). Selector labels fill constraints without one. */}}
{{- define "flowfleet.placement" -}}
{{- $root := index . 0 }}{{ $settings := index . 1 }}{{ $selector := index . 2 }}
{{- $accelerator := index . 3 | ternary $root.Values.accelerator (dict) }}
{{- with merge (dict) $settings.nodeSelector ($accelerator.nodeSelector | default dict) }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with concat $settings.tolerations ($accelerator.tolerations | default list) }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $settings.affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $settings.topologySpreadConstraints }}
topologySpreadConstraints:
  {{- range . }}
  - {{- toYaml . | nindent 4 }}
    {{- if not .labelSelector }}
    labelSelector:
      matchLabels:
        {{- $selector | nindent 8 }}
    {{- end }}
  {{- end }}
{{- end }}
{{- with $settings.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with $settings.schedulerName }}
schedulerName: {{ . }}
{{- end }}
{{- with $settings.resourceClaims }}
resourceClaims:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $settings.initContainers }}
initContainers:
  {{- range . }}
  - {{- toYaml (merge (deepCopy .) (dict "imagePullPolicy" $root.Values.images.pullPolicy "securityContext" (include "flowfleet.securityContext" $root | fromYaml))) | nindent 4 }}
  {{- end }}
{{- end }}
{{- end }}

{{/* Extended resource of a pool, reward, judge or the trainers; none where claims bring the devices: (list root settings). */}}
{{- define "flowfleet.deviceResource" -}}
{{- $settings := index . 1 -}}
{{- if not $settings.resourceClaims }}{{ $settings.acceleratorResource | default (index . 0).Values.accelerator.resource }}{{ end -}}
{{- end }}

{{/* Resources of a container, with its devices: (list root settings accelerators). */}}
{{- define "flowfleet.resources" -}}
{{- $settings := index . 1 }}{{ $accelerators := index . 2 }}
{{- $resources := deepCopy $settings.resources }}
{{- with and $accelerators (include "flowfleet.deviceResource" .) }}
{{- $_ := set $resources "limits" (set ($resources.limits | default dict) . $accelerators) }}
{{- end }}
{{- with $settings.resourceClaims }}
{{- $claims := $resources.claims | default list }}
{{- range . }}{{ $claims = append $claims (dict "name" .name) }}{{ end }}
{{- $_ := set $resources "claims" $claims }}
{{- end }}
{{- toYaml $resources }}
{{- end }}

{{/* Environment that names a container's RDMA resources: a process ends where verbs find no device. (settings) */}}
{{- define "flowfleet.rdmaEnv" -}}
{{- $given := list }}
{{- range $name, $_ := .resources.limits }}{{ if hasPrefix "rdma/" $name }}{{ $given = append $given $name }}{{ end }}{{ end }}
{{- with $given }}
- name: FLOWFLEET_RDMA
  value: {{ join "," . }}
{{- end }}
{{- end }}

{{- define "flowfleet.imagePullSecrets" -}}
{{- with .Values.images.pullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{/* Secrets: names of those that are given or generated. */}}
{{- define "flowfleet.apiKeySecret" -}}
{{- .Values.secrets.apiKey.existingSecret | default (printf "%s-secrets" (include "flowfleet.fullname" .)) }}
{{- end }}

{{- define "flowfleet.rpcTokenSecret" -}}
{{- .Values.secrets.rpcToken.existingSecret | default (printf "%s-secrets" (include "flowfleet.fullname" .)) }}
{{- end }}

{{- define "flowfleet.redisSecret" -}}
{{- .Values.redis.auth.existingSecret | default (printf "%s-redis" (include "flowfleet.fullname" .)) }}
{{- end }}

{{/* "true" where helm talks to a cluster; "" in `helm template` and tools of GitOps, for which `lookup` finds nothing. */}}
{{- define "flowfleet.hasCluster" -}}
{{- if or (lookup "v1" "ServiceAccount" .Release.Namespace "default") (lookup "v1" "Service" "default" "kubernetes") }}true{{ end }}
{{- end }}

{{/* A generated value, kept when its Secret is there: (list root secretName key length). Without a cluster it is the same
at each rendering, and `flowfleet.refused` keeps it from being installed. */}}
{{- define "flowfleet.generated" -}}
{{- $root := index . 0 -}}
{{- $there := lookup "v1" "Secret" $root.Release.Namespace (index . 1) -}}
{{- $new := include "flowfleet.hasCluster" $root | empty | not | ternary (randAlphaNum (int (index . 3))) (printf "rendered-without-a-cluster-%s" (index . 2)) -}}
{{- get (($there | default dict).data | default dict) (index . 2) | default ($new | b64enc) }}
{{- end }}

{{/* Label of a generated Secret that was rendered without a cluster. API servers refuse it and quote it: what says
which value to set, where a tool that only renders would make other passwords each time. (list root value) */}}
{{- define "flowfleet.refused" -}}
{{- if not (include "flowfleet.hasCluster" (index . 0)) }}
flowfleet.io/refused: "set {{ index . 1 }}.existingSecret: helm could ask no cluster, so no password can be generated and kept"
{{- end }}
{{- end }}

{{/* TLS: the Secret of a component. (list root component) */}}
{{- define "flowfleet.tlsSecret" -}}
{{- $root := index . 0 -}}
{{- if $root.Values.tls.certManager.enabled -}}
{{- printf "%s-tls-%s" (include "flowfleet.fullname" $root) (index . 1) }}
{{- else -}}
{{- get $root.Values.tls.existingSecrets (index . 1) }}
{{- end }}
{{- end }}

{{- define "flowfleet.tlsDir" -}}/etc/flowfleet/tls{{- end }}

{{- define "flowfleet.scheme" -}}
{{- .Values.tls.enabled | ternary "HTTPS" "HTTP" }}
{{- end }}

{{/* Environment that every process has: (list root). */}}
{{- define "flowfleet.baseEnv" -}}
- name: HOME
  value: /tmp
- name: POD_NAME
  valueFrom: {fieldRef: {fieldPath: metadata.name}}
- name: POD_NAMESPACE
  valueFrom: {fieldRef: {fieldPath: metadata.namespace}}
- name: POD_IP
  valueFrom: {fieldRef: {fieldPath: status.podIP}}
{{- if .Values.tls.enabled }}
- name: FLOWFLEET_TLS_DIR
  value: {{ include "flowfleet.tlsDir" . }}
- name: FLOWFLEET_TLS_NAME
  value: {{ .Values.tls.name }}
{{- end }}
{{- with .Values.traces }}
{{- if .endpoint }}
- {name: OTEL_EXPORTER_OTLP_ENDPOINT, value: {{ quote .endpoint }}}
- {name: OTEL_EXPORTER_OTLP_PROTOCOL, value: {{ quote .protocol }}}
- {name: OTEL_RESOURCE_ATTRIBUTES, value: "k8s.pod.name=$(POD_NAME),k8s.namespace.name=$(POD_NAMESPACE)"}
{{- with .env }}
{{ toYaml . }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}

{{/* Whether a Secret has an entry for each kind of service: "true" or "". Generated ones have. (its values) */}}
{{- define "flowfleet.perKind" -}}
{{- if or (not .existingSecret) .perKind }}true{{ end }}
{{- end }}

{{/* Tokens of a kind of service (flowfleet/rpc/kinds.py): (list root component). */}}
{{- define "flowfleet.rpcEnv" -}}
{{- $root := index . 0 }}{{ $component := index . 1 }}{{ $token := $root.Values.secrets.rpcToken -}}
{{- $secret := include "flowfleet.rpcTokenSecret" $root }}
{{- $perKind := include "flowfleet.perKind" $token }}
{{- $suffix := $perKind | empty | ternary "" (get (dict "trainer" "-trainer" "reward" "-reward" "rollout" "-replica") $component) }}
- name: FLOWFLEET_RPC_TOKEN
  valueFrom: {secretKeyRef: {name: {{ $secret }}, key: {{ $token.key }}{{ $suffix }}{{ if eq $suffix "-replica" }}, optional: true{{ end }}}}
{{- if and $perKind (has $component (list "controller" "trainer")) }}
- name: FLOWFLEET_REWARD_RPC_TOKEN
  valueFrom: {secretKeyRef: {name: {{ $secret }}, key: {{ $token.key }}-reward}}
{{- end }}
{{- if and $perKind (eq $component "controller") }}
- name: FLOWFLEET_ROLLOUT_RPC_TOKEN
  valueFrom: {secretKeyRef: {name: {{ $secret }}, key: {{ $token.key }}-rollout, optional: true}}
- name: FLOWFLEET_TRAINER_RPC_TOKEN
  valueFrom: {secretKeyRef: {name: {{ $secret }}, key: {{ $token.key }}-trainer}}
- name: FLOWFLEET_TRAINER_RPC_ACCEPT
  valueFrom: {secretKeyRef: {name: {{ $secret }}, key: {{ $token.key }}-accept}}
{{- end }}
{{- if and $perKind (has $component (list "rollout" "trainer")) }}
- name: FLOWFLEET_RPC_ACCEPT
  valueFrom: {secretKeyRef: {name: {{ $secret }}, key: {{ $token.key }}-accept}}
{{- end }}
{{- end }}

{{- define "flowfleet.redisName" -}}
{{ include "flowfleet.fullname" . }}-redis{{ if .Values.redis.highAvailability.enabled }}-ha{{ end }}
{{- end }}

{{/* The pods of a highly available Redis: (list root separator suffix). */}}
{{- define "flowfleet.redisHosts" -}}
{{- $root := index . 0 }}{{ $suffix := index . 2 }}{{ $hosts := list }}{{ $name := include "flowfleet.redisName" $root }}
{{- range until 3 }}{{ $hosts = append $hosts (printf "%s-%d.%s.%s.svc%s" $name . $name $root.Release.Namespace $suffix) }}{{ end }}
{{- join (index . 1) $hosts }}
{{- end }}

{{/* FLOWFLEET_REDIS_URL of a user of the Redis in the release: (list root user). */}}
{{- define "flowfleet.redisUrl" -}}
{{- $root := index . 0 }}{{ $user := index . 1 }}{{ $dir := include "flowfleet.tlsDir" $root }}
{{- $query := list }}
{{- $place := printf "%s:6379/0" (include "flowfleet.redisName" $root) }}
{{- if $root.Values.redis.highAvailability.enabled }}
{{- $place = printf "%s/flowfleet/0" (include "flowfleet.redisHosts" (list $root "," ":26379")) }}
{{- with $user }}{{ $query = append $query (printf "sentinel_username=%s" .) }}{{ end }}
{{- $query = append $query "sentinel_password=$(FLOWFLEET_REDIS_PASSWORD)" }}
{{- end }}
{{- if $root.Values.tls.enabled }}
{{- $query = concat $query (list (printf "ssl_ca_certs=%s/ca.crt" $dir) (printf "ssl_certfile=%s/tls.crt" $dir) (printf "ssl_keyfile=%s/tls.key" $dir)) }}
{{- end }}
{{- $root.Values.tls.enabled | ternary "rediss" "redis" }}{{ if $root.Values.redis.highAvailability.enabled }}+sentinel{{ end -}}
://{{ $user }}:$(FLOWFLEET_REDIS_PASSWORD)@{{ $place }}{{ with $query }}?{{ join "&" . }}{{ end }}
{{- end }}

{{/* Environment of what reads Redis and blobs, controller, rollouts, trainers: (list root component). */}}
{{- define "flowfleet.dataEnv" -}}
{{- $component := index . 1 }}{{ with index . 0 }}
{{- if .Values.redis.enabled }}
{{- $perKind := include "flowfleet.perKind" .Values.redis.auth }}
{{- $user := empty $perKind | ternary "" $component }}
- name: FLOWFLEET_REDIS_PASSWORD
  valueFrom: {secretKeyRef: {name: {{ include "flowfleet.redisSecret" . }}, key: {{ .Values.redis.auth.key }}{{ with $user }}-{{ . }}{{ end }}}}
- name: FLOWFLEET_REDIS_URL
  value: {{ include "flowfleet.redisUrl" (list . $user) }}
{{- else }}
- name: FLOWFLEET_REDIS_URL
  valueFrom: {secretKeyRef: {name: {{ .Values.redis.external.existingSecret }}, key: {{ .Values.redis.external.key }}{{ if .Values.redis.external.perKind }}-{{ $component }}{{ end }}}}
{{- end }}
- name: FLOWFLEET_BLOBS
  value: {{ .Values.blobs.url }}
{{- with .Values.env }}
{{ toYaml . }}
{{- end }}
{{- end }}
{{- end }}

{{/* What loads models of the Hub has (flowfleet/hub.py). */}}
{{- define "flowfleet.hubEnv" -}}
{{- if .Values.hub.models }}
- {name: FLOWFLEET_HUB_MODELS, value: {{ join "," .Values.hub.models | quote }}}
- {name: HF_HUB_OFFLINE, value: {{ .Values.hub.download | ternary "0" "1" | quote }}}
- {name: HF_HOME, value: /var/cache/huggingface}
{{- with .Values.hub.token.existingSecret }}
- name: HF_TOKEN
  valueFrom: {secretKeyRef: {name: {{ . }}, key: {{ $.Values.hub.token.key }}}}
{{- end }}
{{- end }}
{{- end }}

{{- define "flowfleet.hubMounts" -}}
{{- if .Values.hub.models }}
- {name: hub, mountPath: /var/cache/huggingface}
{{- end }}
{{- end }}

{{- define "flowfleet.hubVolumes" -}}
{{- with .Values.hub }}
{{- if .models }}
- name: hub
  {{- toYaml (.volume | default (dict "emptyDir" dict)) | nindent 2 }}
{{- end }}
{{- end }}
{{- end }}

{{/* Mounts and volumes that every pod has, and TLS: the second by component. */}}
{{- define "flowfleet.baseMounts" -}}
- name: tmp
  mountPath: /tmp
{{- if .Values.tls.enabled }}
- name: tls
  mountPath: {{ include "flowfleet.tlsDir" . }}
  readOnly: true
{{- end }}
{{- end }}

{{- define "flowfleet.baseVolumes" -}}
{{- $root := index . 0 -}}
- name: tmp
  emptyDir: {}
{{- if $root.Values.tls.enabled }}
- name: tls
  secret:
    secretName: {{ include "flowfleet.tlsSecret" . }}
    defaultMode: 0440
{{- end }}
{{- end }}

{{- define "flowfleet.stateClaim" -}}
{{- .Values.state.existingClaim | default (printf "%s-state" (include "flowfleet.fullname" .)) }}
{{- end }}

{{- define "flowfleet.budget" -}}
{{- $root := index . 0 }}{{ $name := index . 1 }}{{ $labels := index . 2 }}{{ $selector := index . 3 }}{{ $budget := index . 4 }}
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata:
  name: {{ $name }}
  labels:
    {{- $labels | nindent 4 }}
  {{- with include "flowfleet.annotations" (list $root dict) }}{{ . | trim | nindent 2 }}{{ end }}
spec:
  maxUnavailable: {{ $budget.maxUnavailable }}
  unhealthyPodEvictionPolicy: AlwaysAllow
  selector:
    matchLabels:
      {{- $selector | nindent 6 }}
{{- end }}

{{/* A ScaledObject for a pool or reward: (list root name labels component own settings). */}}
{{- define "flowfleet.scaledObject" -}}
{{- $root := index . 0 }}{{ $name := index . 1 }}{{ $labels := index . 2 }}{{ $component := index . 3 }}{{ $settings := index . 4 }}
{{- $scaling := $settings.autoscaling }}
apiVersion: keda.sh/v1alpha1
kind: ScaledObject
metadata:
  name: {{ $name }}
  labels:
    {{- $labels | nindent 4 }}
  {{- with include "flowfleet.annotations" (list $root dict) }}{{ . | trim | nindent 2 }}{{ end }}
spec:
  scaleTargetRef:
    name: {{ $name }}
  minReplicaCount: {{ int $scaling.minReplicas }}
  maxReplicaCount: {{ int $scaling.maxReplicas }}
  pollingInterval: {{ int $scaling.pollingSeconds }}
  cooldownPeriod: {{ int $scaling.cooldownSeconds }}
  advanced:
    horizontalPodAutoscalerConfig:
      behavior:
        scaleUp:
          stabilizationWindowSeconds: 0
        scaleDown:
          stabilizationWindowSeconds: {{ int $scaling.scaleDownStabilizationSeconds }}
  triggers:
    - type: external-push
      metricType: AverageValue
      metadata:
        scalerAddress: {{ include "flowfleet.fullname" $root }}-scaler.{{ $root.Release.Namespace }}.svc:8471
        component: {{ $component }}
        name: {{ $settings.name }}
        {{- if $root.Values.tls.enabled }}
        enableTLS: "true"
        {{- end }}
      {{- if $root.Values.tls.enabled }}
      authenticationRef:
        name: {{ include "flowfleet.fullname" $root }}-scaler
      {{- end }}
{{- end }}
{{- /* Folders that jobs may read, as JSON: the images' recipes, the volumes that controller, rollouts and trainers share, but for those of Secrets and their like, and those of the values. */ -}}
{{- define "flowfleet.dataRoots" -}}
{{- $roots := list "/app/recipes" -}}
{{- $private := list -}}
{{- range .Values.volumes -}}
{{- if or .secret .configMap .projected .downwardAPI (contains "secret" (dig "csi" "driver" "" .)) }}{{ $private = append $private .name }}{{ end -}}
{{- end -}}
{{- range .Values.volumeMounts }}{{ if not (has .name $private) }}{{ $roots = append $roots .mountPath }}{{ end }}{{ end -}}
{{- toJson (uniq (concat $roots .Values.controller.dataRoots)) -}}
{{- end }}
{{- /* Networks of the API server, as JSON: those of the values, else its addresses as the cluster tells them; none where only `to` is given. */ -}}
{{- define "flowfleet.apiServer" -}}
{{- $cidrs := .Values.networkPolicy.apiServer.cidrs -}}
{{- if not (or $cidrs .Values.networkPolicy.apiServer.to) -}}
{{- $addresses := list -}}
{{- with lookup "v1" "Service" "default" "kubernetes" -}}
{{- $addresses = .spec.clusterIPs | default (list .spec.clusterIP) -}}
{{- end -}}
{{- with lookup "discovery.k8s.io/v1" "EndpointSlice" "default" "kubernetes" -}}
{{- range .endpoints }}{{ $addresses = concat $addresses .addresses }}{{ end -}}
{{- end -}}
{{- range uniq $addresses }}{{ $cidrs = append $cidrs (printf "%s/%s" . (ternary "128" "32" (contains ":" .))) }}{{ end -}}
{{- /* API servers refuse this and quote it. */ -}}
{{- if not $cidrs }}{{ $cidrs = list "set networkPolicy.apiServer.cidrs: helm could ask no cluster" }}{{ end -}}
{{- end -}}
{{- toJson $cidrs -}}
{{- end }}
