"""SGLang servers: command line, handshake, memory; and the plugin that runs inside of them."""
