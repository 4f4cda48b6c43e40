"""Configuring: from what clients measure of their data to a configuration, without a file from the user.

facts          `Facts`: what is known of a federation, joined from its clients; never a single case
plan           `Choice` and `ConfigurationPlan`: every setting that was chosen, with its reason
nnunet_plans   `take_over`: what an nnUNetPlans.json decides, in place of our own choices
"""
