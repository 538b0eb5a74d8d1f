"""Whether what the image is built from has vulnerabilities that PyPI's advisories know.

make audit                        ends with 1 for a vulnerability, and where advisories cannot be had
make audit AUDIT=--where-possible the same, but says so and ends with 0 where they cannot be had
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

LOCK = Path(__file__).parents[1] / "requirements-run.lock"
LIMIT_S = 120.0


def main(arguments: list[str]) -> int:
    """Ask, print and judge. `arguments`: the auditing program, and what is given beside it."""
    program, *options = arguments
    command = [program, "--disable-pip", "--require-hashes", "--requirement", str(LOCK), "--format", "json"]
    try:
        asked = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
        packages = json.loads(asked.stdout)["dependencies"]
    except (subprocess.TimeoutExpired, json.JSONDecodeError) as error:
        return _not_had(options, f"no answer: {error}")
    unknown = [p["name"] for p in packages if "skip_reason" in p]
    for package in packages:
        for found in package.get("vulns", ()):
            fixed = ", ".join(found["fix_versions"]) or "nothing yet"
            print(f"{package['name']} {package['version']}: {found['id']}, fixed in {fixed}")
    if any(package.get("vulns") for package in packages):
        return 1
    if unknown:
        return _not_had(options, f"{len(unknown)} of {len(packages)} packages are not known where it asks")
    print(f"{len(packages)} packages, no known vulnerabilities")
    return 0


def _not_had(options: list[str], why: str) -> int:
    print(f"NOT AUDITED, no advisories can be had here: {why}")
    return 0 if "--where-possible" in options else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
