"""Why is the accept length low? Findings from a recording, and the next step for each."""
