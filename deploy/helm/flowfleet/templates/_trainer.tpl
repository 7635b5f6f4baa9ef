{{/* The Job of a trainer, which the controller completes (services/controller/platforms/kubernetes/template.py). */}}
{{- define "flowfleet.trainerJob" -}}
{{- $fullname := include "flowfleet.fullname" . }}
{{- $name := printf "%s-trainer" $fullname }}
{{- $trainer := .Values.trainer }}
{{- $selector := include "flowfleet.selector" (list . "trainer") }}
{{- $resource := include "flowfleet.deviceResource" (list . $trainer) }}
{{- $accelerated := not (empty (or $resource $trainer.resourceClaims)) }}
{{- $accelerator := $accelerated | ternary .Values.accelerator dict }}
apiVersion: batch/v1
kind: Job
metadata:
  name: {{ $name }}
  labels:
    {{- include "flowfleet.labels" (list . "trainer") | nindent 4 }}
    {{- with $trainer.kueue.queueName }}
    kueue.x-k8s.io/queue-name: {{ . }}
    {{- end }}
  annotations:
    flowfleet.io/ranks-per-pod: {{ int $trainer.ranksPerPod | quote }}
    flowfleet.io/accelerator: {{ $resource | quote }}
    flowfleet.io/priority-classes: {{ join "," $trainer.allowed.priorityClasses | quote }}
    flowfleet.io/queues: {{ join "," $trainer.allowed.queues | quote }}
    flowfleet.io/placement-s: {{ int $trainer.placementSeconds | quote }}
    flowfleet.io/drain-s: {{ int $trainer.drainSeconds | quote }}
    {{- with .Values.commonAnnotations }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
spec:
  {{- if $trainer.kueue.queueName }}
  suspend: true
  {{- end }}
  completionMode: Indexed
  completions: 1
  parallelism: 1
  backoffLimit: 0
  ttlSecondsAfterFinished: {{ int $trainer.ttlSeconds }}
  template:
    metadata:
      labels:
        {{- include "flowfleet.podLabels" (list . "trainer" $trainer.podLabels) | nindent 8 }}
      annotations:
        kubectl.kubernetes.io/default-container: trainer
        {{- with $trainer.podAnnotations }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
    spec:
      subdomain: {{ $name }}
      restartPolicy: Never
      serviceAccountName: {{ $fullname }}
      automountServiceAccountToken: false
      enableServiceLinks: false
      {{- with $accelerator.runtimeClass }}
      runtimeClassName: {{ . }}
      {{- end }}
      securityContext:
        {{- include "flowfleet.podSecurityContext" (list . ($accelerator.supplementalGroups | default list)) | nindent 8 }}
      terminationGracePeriodSeconds: {{ add (int $trainer.drainSeconds) 15 }}
      {{- with include "flowfleet.imagePullSecrets" . }}{{ . | trim | nindent 6 }}{{ end }}
      {{- $spread := list }}
      {{- range $trainer.topologySpreadConstraints }}
      {{- $spread = append $spread (empty .labelSelector | ternary (merge (dict "matchLabelKeys" (list "flowfleet.io/job")) .) .) }}
      {{- end }}
      {{- $placed := merge (dict "topologySpreadConstraints" $spread) $trainer }}
      {{- with include "flowfleet.placement" (list . $placed $selector $accelerated) }}{{ . | trim | nindent 6 }}{{ end }}
      containers:
        - name: trainer
          image: {{ include "flowfleet.image" (list . "trainer") }}
          imagePullPolicy: {{ .Values.images.pullPolicy }}
          env:
            {{- include "flowfleet.baseEnv" . | nindent 12 }}
            {{- with include "flowfleet.hubEnv" . }}{{ . | trim | nindent 12 }}{{ end }}
            {{- include "flowfleet.rpcEnv" (list . "trainer") | trim | nindent 12 }}
            - name: FLOWFLEET_STATE_DIR
              value: /var/lib/flowfleet
            - name: FLOWFLEET_TERMINATION_MESSAGE
              value: /dev/termination-log
            - name: FLOWFLEET_DEVICE
              value: {{ include "flowfleet.device" (list . $accelerated) }}
            {{- include "flowfleet.dataEnv" (list . "trainer") | trim | nindent 12 }}
            {{- with include "flowfleet.rdmaEnv" $trainer }}{{ . | trim | nindent 12 }}{{ end }}
            {{- with concat ($accelerator.env | default list) $trainer.env }}
            {{- toYaml . | nindent 12 }}
            {{- end }}
          {{- with .Values.envFrom }}
          envFrom:
            {{- toYaml . | nindent 12 }}
          {{- end }}
          terminationMessagePolicy: FallbackToLogsOnError
          ports:
            - {name: grpc, containerPort: 7000}
            - {name: health, containerPort: 7001}
            - {name: metrics, containerPort: 9470}
            - {name: rendezvous, containerPort: 29500}
          resources:
            {{- include "flowfleet.resources" (list . $trainer 0) | nindent 12 }}
          securityContext:
            {{- include "flowfleet.securityContext" . | nindent 12 }}
          volumeMounts:
            {{- include "flowfleet.baseMounts" . | nindent 12 }}
            {{- with include "flowfleet.hubMounts" . }}{{ . | trim | nindent 12 }}{{ end }}
            - {name: shm, mountPath: /dev/shm}
            - {name: state, mountPath: /var/lib/flowfleet}
            {{- with concat .Values.volumeMounts ($accelerator.volumeMounts | default list) $trainer.volumeMounts }}
            {{- toYaml . | nindent 12 }}
            {{- end }}
      volumes:
        {{- include "flowfleet.baseVolumes" (list . "trainer") | nindent 8 }}
        {{- with include "flowfleet.hubVolumes" . }}{{ . | trim | nindent 8 }}{{ end }}
        - name: shm
          emptyDir: {medium: Memory, sizeLimit: {{ $trainer.sharedMemory }}}
        - name: state
          persistentVolumeClaim: {claimName: {{ include "flowfleet.stateClaim" . }}}
        {{- with concat .Values.volumes ($accelerator.volumes | default list) $trainer.volumes }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
{{- end }}
