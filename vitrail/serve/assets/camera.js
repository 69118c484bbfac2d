/* The camera: frames are analysed one after the other, as fast as the service answers. */

export class Camera {
  constructor(button, { onFrame, onError }) {
    this.button = button;
    this.onFrame = onFrame;
    this.onError = onError;
    this.video = null;
    button.hidden = !navigator.mediaDevices?.getUserMedia; // browsers allow it on localhost and over HTTPS only
    button.addEventListener("click", () => (this.video ? this.stop() : this.start()));
    document.addEventListener("visibilitychange", () => document.hidden && this.stop());
  }

  async start() {
    let stream;
    try {
      stream = await navigator.mediaDevices.getUserMedia({ video: { facingMode: "environment", width: { ideal: 640 } } });
    } catch {
      this.onError("The camera cannot be used. Allow it in the browser, or choose a picture.");
      return;
    }
    const video = document.createElement("video");
    video.srcObject = stream;
    video.playsInline = video.muted = true;
    await video.play();
    this.video = video;
    this.button.textContent = "Take picture";
    while (this.video === video) {
      const frame = await grab(video);
      if (this.video === video) await this.onFrame(frame);
    }
  }

  /* The last frame stays. */
  stop() {
    if (!this.video) return;
    for (const track of this.video.srcObject.getTracks()) track.stop();
    this.video = null;
    this.button.textContent = "Camera";
  }
}

function grab(video) {
  const canvas = document.createElement("canvas");
  canvas.width = video.videoWidth;
  canvas.height = video.videoHeight;
  canvas.getContext("2d").drawImage(video, 0, 0);
  return new Promise((done) => canvas.toBlob(done, "image/jpeg", 0.92));
}
