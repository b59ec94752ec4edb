"""The part of specpilot that runs inside SGLang's processes. `entry.register` is its door."""
