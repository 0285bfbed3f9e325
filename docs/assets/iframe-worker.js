// Browsers start no worker from a file on disk. There, the search's worker runs in a hidden frame instead.
if (location.protocol === "file:")
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      document.documentElement.append(frame)
      this.inside = frame.contentWindow
      this.inside.importScripts = (...urls) => Promise.all(urls.map(each => this.load(each)))
      this.inside.postMessage = data => this.dispatchEvent(new MessageEvent("message", { data }))
      this.ready = this.load(url)
    }
    load(url) {
      return new Promise((loaded, failed) => {
        const script = this.inside.document.createElement("script")
        script.src = url
        script.onload = loaded
        script.onerror = failed
        this.inside.document.body.append(script)
      })
    }
    postMessage(data) {
      this.ready.then(() => this.inside.dispatchEvent(new MessageEvent("message", { data })))
    }
    terminate() {}
  }
