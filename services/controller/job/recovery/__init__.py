"""What a job does about failures: retries, lost blobs, trainers that hang or resume elsewhere."""
