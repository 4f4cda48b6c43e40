"""Configuring: from what clients measure of their data to a configuration, without a file from the user.

measuring      `measure_federation`: the fingerprints of a federation.yaml's clients, and their facts
joining        `join_fingerprints`: fingerprints, from wherever they came, as facts
facts          `Facts`: what is known of a federation, joined from its clients; never a single case
rules          `configure`: from facts to a plan; the rules are in *_rules
plan           `Choice` and `ConfigurationPlan`: every setting that was chosen, with its reason
budget         `Budget`: how long to train; from a time to steps, by the measured pace
run_plan       `plan_run`: all of it, from a federation.yaml and a budget to a run
method_choice  `choose_method`: a short list of methods, tried on validation cases
nnunet_plans   `take_over`: what an nnUNetPlans.json decides, in place of our own choices
plan_file      a plan as a configuration to edit, and as plan.yaml
"""
