"""The control plane: REST, jobs as persisted state machines, the registry of the fleet, scaling. Free of torch.

    app, settings, ports   what is wired into one process, by which flags, on which platform
    api/           REST: requests of people and programs
    jobs/          submission, queue, scheduler (the leader's), quarantine; limits: what a job may ask for
    scaling/       how many replicas a pool needs, told to KEDA
    metrics/       what Prometheus is shown
    job/           one running job: its state machine, its commands, its reports
    platforms/     where the fleet runs, a folder a platform: its directory, its trainers and their places
    retention/     what stays of ended jobs, and how full Redis is
    store/         what Redis holds of jobs, and who leads
    rewards/       rewards asked, judged by their answers, composed, compared, swapped
    votes/         people's votes
    prompts/       a job's data: read, dealt out by step, brought to the rollouts
    reading/       files and URLs that jobs name, read by processes without secrets
    fleet/         which rollout replicas, pools and rewards there are

Each may import what stands below it; `make lint` checks that.
"""
