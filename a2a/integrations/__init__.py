"""integrations: other people's calling conventions, one file each; no engine is needed to import them."""
