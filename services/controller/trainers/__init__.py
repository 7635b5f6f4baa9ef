"""A job's trainer: started, found again and stopped, as processes here or as a Job on Kubernetes."""
