"""What this machine can do, and what each missing piece would enable."""
