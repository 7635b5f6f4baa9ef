"""Starts a thread when it is imported, which no module of a fork server may."""

import threading
import time

threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
