"""Models as shapes: profiles by name, Hugging Face configurations, and the work of one step."""
