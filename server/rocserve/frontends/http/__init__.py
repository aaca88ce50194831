"""The HTTP front end: KServe v2's REST protocol with Triton's extensions."""
