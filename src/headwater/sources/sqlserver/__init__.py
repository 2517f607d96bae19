"""SQL Server, followed through its change data capture."""
