"""A participant's kit: its folder and keys, who signs them, and how they end.

Others use `kit` (the folder), `authority` (the project's certificate authority), `project` (project.yaml),
`provisioning` and `enrolment` (kits made whole, or by the hospital itself), `revocation`, `private_key` and
`signing` (who a hospital is in a secure sum).
"""
