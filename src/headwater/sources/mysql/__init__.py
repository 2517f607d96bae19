"""MySQL and MariaDB: their binlog, their catalog, their types."""
