"""Files, our own or from others: opened safely, parsed and displayed; written completely or not at all."""
