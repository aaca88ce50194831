"""Plans which programs a model needs, and what each of them depends on."""
