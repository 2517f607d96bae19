"""What every other package stands on: processes, files, retries. It knows nothing of rows."""
