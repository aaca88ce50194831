"""Schedules validated requests on the instances that run them."""
