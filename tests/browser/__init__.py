"""The labs and the panel as people meet them: JupyterLab in a browser."""
