"""README.txt of a kit: its steps in short, for whoever opens the folder first."""

from __future__ import annotations

from wardround.deploy.kits.kit import Kit


def render_readme(kit: Kit) -> str:
    return render_organiser_readme(kit) if kit.role == "organiser" else render_hospital_readme(kit)


def render_hospital_readme(kit: Kit) -> str:
    return f"""\
This is the kit of hospital '{kit.name}' in the project '{kit.project}'.

It holds a private key: whoever has it can take part as '{kit.name}'. Keep the folder on one machine, readable
by the one account that runs wardround, and tell the organiser at once if it was lost or copied.

  1. pip install 'wardround[hospitals]=={kit.version}'
  2. cd ..   (wardround runs outside its kit)
  3. wardround hospital setup {kit.name}      asks, checks, and writes site.yaml: your rules, never sent
  4. wardround join {kit.name}                later, or as a service: the unit is beside this folder

Keep no other file in this folder: a kit with an added or changed file is refused.
Connections: outbound TCP to {kit.server}, port {kit.port} (TLS, both sides prove who they are). Nothing
connects to this machine. What left it is listed in state/egress.jsonl: wardround egress show {kit.name}
Before the certificate expires (wardround preflight warns): wardround enrol {kit.name} --renew
"""


def render_organiser_readme(kit: Kit) -> str:
    return f"""\
This is the organiser's kit of the project '{kit.project}'. It runs on {kit.server}.

  1. pip install 'wardround[hospitals]=={kit.version}'
  2. cd ..   (wardround runs outside its kit)
  3. wardround preflight {kit.name}
  4. wardround server {kit.name}
  5. wardround submit run.yaml

Open TCP port {kit.port} for the hospitals; no other port is used. Your own commands go through files in
this folder. It holds a private key: keep it readable by the account that runs wardround alone, and keep no
other file in it: a kit with an added or changed file is refused.
"""
