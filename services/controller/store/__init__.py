"""What Redis holds of jobs: records, events, metrics, samples, reward revisions; and which controller leads."""
