"""A participant's kit: its folder and keys, who signs them, and how they end.

Others use `kit` (the folder), `authority` (the project's certificate authority), `project` (project.yaml),
`provisioning` and `enrolment` (kits made whole, or by the hospital itself), `revocation` and `private_key`.
"""
