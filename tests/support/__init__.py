"""What tests of several layers share: server processes, small models, clients, stand-ins."""
