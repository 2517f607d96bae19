"""Control: what can be asked of a capture, of a query, and of the process that runs a pipeline."""
