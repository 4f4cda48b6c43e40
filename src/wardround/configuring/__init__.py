"""Configuring: from what clients measure of their data to a configuration, without a file from the user.

measuring  `measure_federation`: the fingerprints of a federation.yaml's clients, and their facts
joining    `join_fingerprints`: fingerprints, from wherever they came, as facts
facts      `Facts`: what is known of a federation, joined from its clients; never a single case
rules      `configure(facts, steps=...)`: all rules; a module each for preparation, network and training
plan       `Choice` and `ConfigurationPlan`: every setting that was chosen, with its reason
"""
