"""``bench report``: tables (``tables``), plots (``plots`` on ``svg``), the two pages (``markdown``, ``html``)."""
