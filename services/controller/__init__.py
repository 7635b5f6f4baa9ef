"""The control plane: REST, jobs as persisted state machines, the registry of the fleet, scaling. Free of torch.

    app, settings, platform, ports   what is wired into one process, by which flags, on which platform
    scheduler      the leader's: which jobs run here
    quarantine     keeps a job that stops the controller from the others; limits: what a job may ask for
    api/           REST: what people ask and submit, checked
    scaling/       how many replicas a pool needs, told to KEDA
    metrics/       what Prometheus is shown
    job/           one running job: its state machine, its driver, its training step
    retention/     what stays of ended jobs, and how full Redis is
    trainers/      a job's trainer started, found again and stopped: as processes here, as a Job on Kubernetes
    store/         what Redis holds of jobs, and who leads
    rewards/       rewards asked, judged by their answers, composed, compared, swapped
    prompts/       a job's data: read, dealt out by step, brought to the rollouts
    reading/       files and URLs that jobs name, read by processes without secrets
    kubernetes/    the cluster as the controller sees it
    fleet/         which rollout replicas, pools and rewards there are

Each may import what stands below it; `make lint` checks that.
"""
