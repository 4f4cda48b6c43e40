"""Configuring: from what clients measure of their data to a configuration, without a file from the user.

facts   `Facts`: what is known of a federation, joined from its clients; never a single case
rules   `configure(facts, steps=...)`: all rules together; one module each for preparation, network, training
plan    `Choice` and `ConfigurationPlan`: every setting that was chosen, with its reason
"""
