"""The console: what an operator sees of Purveyor in a browser, served by the API at `/`.

`gather` reads facts, `flow` and `picture` turn them into what is shown (pure), `pages` show it, `door` lets nobody in
without a login. NiceGUI is imported when somebody opens the console for the first time, and not before.
"""
