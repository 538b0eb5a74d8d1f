"""What any tier may have to run: the stages, the relay, membership, load reports and telemetry."""
