"""Configuring: from what clients measure of their data to a configuration, without a file from the user.

facts   `Facts`: what is known of a federation, joined from its clients; never a single case
budget  `Budget`: how long to train; from a time to steps, by the measured pace
plan    `Choice` and `ConfigurationPlan`: every setting that was chosen, with its reason
plan_file  a plan as a configuration to edit, and as plan.yaml
"""
