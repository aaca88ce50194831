"""Worker processes: how they are started, spoken to, watched and restarted. Imports neither grpc nor protobuf."""
