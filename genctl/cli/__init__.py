"""What a person types: flags become a job, events become what is shown."""
