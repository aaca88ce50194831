"""Serves the clients and repositories of AMD Inference Server: its configurations, requests, workers and calls.
`config/sources.py` reads configurations, `repository/version_loader.py` adapts single items,
`repository/model_repository.py` holds the endpoints, `server.py` adds the calls; their URLs are in
`frontends/http/routes.py`."""
